"""Figures that only lessons draw."""
