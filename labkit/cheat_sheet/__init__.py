"""Every technique with its figures and verdicts on one page."""
