"""A device, link, price or cluster by its name, with the sources of its figures; and the hardware of this machine.

Its names load on first use, so that naming a device does not pay for looking at the machine.
"""

from __future__ import annotations

from forerun.base.doors import door

__all__, __getattr__ = door(__name__, __file__)
