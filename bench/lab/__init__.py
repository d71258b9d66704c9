"""Laboratory: measurements of the parts, simulations, and the tables of the results pages.

It runs from a checkout, ``python -m mlx_redrafter.bench.lab NAME``, and is not in the wheel.
"""
