"""DSpark speculative decoding for Hugging Face Transformers."""

from transformers import AutoConfig, AutoModel

from .configuration_dspark import DSparkConfig
from .modeling_dspark import DSparkDraftModel


AutoConfig.register(DSparkConfig.model_type, DSparkConfig)
AutoModel.register(DSparkConfig, DSparkDraftModel)

__all__ = ["DSparkConfig", "DSparkDraftModel"]
