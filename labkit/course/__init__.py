"""Lessons: find, execute, check, judge and report them."""
