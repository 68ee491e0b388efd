"""Patches of megatron-core as data: planned, applied, audited and reverted."""

from mindspeed_llm.patching.patch import FINGERPRINTS, Patch, fingerprint_of, known_fingerprints, resolve_target
from mindspeed_llm.patching.planner import AppliedPatches, applied_patches, apply, plan, stale_copies

__all__ = [
    "FINGERPRINTS",
    "AppliedPatches",
    "Patch",
    "applied_patches",
    "apply",
    "fingerprint_of",
    "known_fingerprints",
    "plan",
    "resolve_target",
    "stale_copies",
]
