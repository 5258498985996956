"""Differences between the supported versions of Transformers (5.20 and newer), as version comparisons."""

import transformers
from packaging import version

_TRANSFORMERS = version.parse(transformers.__version__)

# The cache argument of every model's forward, and the field of its output: renamed in 5.24.
CACHE_KEY = "cache" if _TRANSFORMERS >= version.parse("5.24.0.dev0") else "past_key_values"
# `speculation_type="dflash"` with an assistant of one's own: as of 5.24, which renamed the cache along with it.
HAS_DFLASH_GENERATOR = _TRANSFORMERS >= version.parse("5.24.0.dev0")
