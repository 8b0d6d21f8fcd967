"""Answers to lesson 24's exercises."""


def smallest_peak(parts, table, card):
    return min(table, key=lambda name: -table[name][1] * parts[table[name][0]])


def by_total(parts, table, card):
    """Takes its share of the whole peak."""
    total = sum(parts.values())
    fitting = [name for name, (_, share, _) in table.items() if total * (1 - share) <= card]
    return min(fitting, key=lambda name: table[name][2]) if fitting else "none"


def alone(measure, names):
    """Ranks by each technique's figures on the plain job."""
    peak, seconds = measure([])
    worth = {}
    for name in names:
        saved, added = peak - measure([name])[0], measure([name])[1] - seconds
        if saved > 0:
            worth[name] = (True, saved) if added <= 0 else (False, saved / added)
    return sorted(worth, key=worth.get, reverse=True)


MISTAKES = [
    ("24-1", lambda parts, table, card: "none", "One of them is enough"),
    ("24-1", smallest_peak, "adds fewer seconds"),
    ("24-1", by_total, "alone, and leaves"),
    ("24-2", lambda measure, names: ["e"], "A list of the names"),
    ("24-2", lambda measure, names: [], "After [] you take: nothing more. Better: 'c' saves 3"),
    (
        "24-2",
        lambda measure, names: sorted(names),
        "After [] you take: 'a' saves 10 GiB for +0.2 s",
    ),
    ("24-2", alone, "With a peak that moves"),
]
