"""Draws of property tests: the same in every ``make test``, new ones in every ``make draws``.

What lands or not must not depend on luck; what is found by luck becomes a test of its own.
"""

from hypothesis import HealthCheck, settings

# A slow machine is no fault of what is tested.
settings.register_profile("same", derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")
