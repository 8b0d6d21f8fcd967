"""Figures and HTML of runs; matplotlib is loaded by the modules that draw."""
