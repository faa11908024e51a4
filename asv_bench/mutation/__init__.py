"""Planted faults: does the instrument refuse each before a number is stored?

`python -m asv_bench.mutation` plants one fault after the other into a copy of the source, measures rows of each suite with it by the very
path that the gate uses, and prints which suite refused it. On a GPU the kernels are compiled, elsewhere Triton's interpreter runs them.
"""
