"""Widgets of lessons."""
