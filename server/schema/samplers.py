"""The fields of DRY, top-n-sigma and XTC.

Owner: none. server/jobs/samplers.py checks ranges and has the defaults.
"""

from __future__ import annotations

import msgspec

from server.schema import fields


class SamplerFields(msgspec.Struct, kw_only=True):
    """Fields that most requests leave out."""

    dry_multiplier: fields.DryMultiplier = None
    dry_base: fields.DryBase = None
    dry_allowed_length: fields.DryAllowedLength = None
    dry_penalty_last_n: fields.DryPenaltyLastN = None
    dry_sequence_breakers: fields.DrySequenceBreakers = None
    top_n_sigma: fields.TopNSigma = None
    xtc_probability: fields.XtcProbability = None
    xtc_threshold: fields.XtcThreshold = None
