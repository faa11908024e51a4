"""Kernels (`*.py`), the specs that declare what serves what (`backends`), and the public calls (`ops`)."""
