"""Devices, links, profiles, measuring, fitting: the time of an op, of a collective, of bytes. Knows no graph."""

from cost_models.errors import CostError, MeasureError, ProfileError, UnknownCollectiveError
from cost_models.figures import Curve, Figure, Provenance
from cost_models.links import COLLECTIVES, Group, MeshLink
from cost_models.measure import measure_profile
from cost_models.presets import preset_names
from cost_models.profile import HardwareProfile
from cost_models.store import load_profile

__all__ = [
    "COLLECTIVES",
    "CostError",
    "Curve",
    "Figure",
    "Group",
    "HardwareProfile",
    "MeasureError",
    "MeshLink",
    "ProfileError",
    "Provenance",
    "UnknownCollectiveError",
    "load_profile",
    "measure_profile",
    "preset_names",
]
