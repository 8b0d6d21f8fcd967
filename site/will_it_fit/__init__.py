"""Will it fit? A table of models, ways to train them and shapes of a batch, computed beforehand.

``build`` simulates it, ``table`` reads it. The page ``site/fit/fit.js`` looks things up.
"""
