"""Exercises: the engine that checks answers, and one module of exercises per lesson."""
