"""Record lessons and accuracy on a real GPU."""
