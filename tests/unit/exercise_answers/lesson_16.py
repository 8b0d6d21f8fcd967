"""Answers to lesson 16's exercises."""

import torch

from labkit.exercises.lesson_16 import squeeze, weights_gb


def in_halves(scales):
    """Groups of 128, which cost twice as much."""
    groups = scales.reshape(-1, 128)
    steps = groups.amax(1, keepdim=True) / 255
    return (groups / steps).round().to(torch.uint8), steps


def one_step(scales):
    step = scales.max() / 255
    return (scales / step).round().to(torch.uint8), step


def signed(scales):
    groups = scales.reshape(-1, 256)
    steps = groups.amax(1, keepdim=True) / 127
    return (groups / steps).round().to(torch.int8), steps


def cut_off(scales):
    groups = scales.reshape(-1, 256)
    steps = groups.amax(1, keepdim=True) / 255
    return (groups / steps).to(torch.uint8), steps  # not rounded


def long_codes(scales):
    codes, steps = squeeze(scales)
    return codes.long(), steps


RIGHT = [
    ("16-1", 39.5),
    ("16-1", lambda: round(weights_gb(), 1)),
    ("16-2", in_halves),
]
MISTAKES = [
    ("16-1", 35.3, "are weights, too"),
    ("16-1", 37.4, "as large as the embedding"),
    ("16-1", 42.7, "double them"),
    ("16-1", 38.4, "Scales take bytes"),
    ("16-1", 36.36, "Llama-2-70B"),
    ("16-1", 39.5e9, "check the units"),
    ("16-2", lambda scales: (scales, scales), "should be integers"),
    ("16-2", lambda scales: scales, "should return two tensors"),
    ("16-2", lambda scales: (squeeze(scales)[0][:1], squeeze(scales)[1][:1]), "256 numbers"),
    ("16-2", long_codes, "64.1 bits"),
    ("16-2", one_step, "few enough, but one is off"),
    ("16-2", signed, "few enough, but one is off"),
    ("16-2", cut_off, "few enough, but one is off"),
]
