"""What a lesson calls: its session, claims, verdicts and results."""
