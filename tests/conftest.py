"""Draws of property tests: the same in every ``make test``, new ones in every ``make draws``.

What lands or not must not depend on luck; what is found by luck becomes a test of its own.
"""

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.load_profile("same")
