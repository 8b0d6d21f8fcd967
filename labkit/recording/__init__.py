"""Record lessons, benchmarks and accuracy on a real GPU."""
