"""DSpark speculative decoding inside Transformers' `generate()`.

Importing the package is all the set-up there is:

    import dspark_hf
    draft = dspark_hf.DSparkDraftModel.from_pretrained("deepseek-ai/dspark_qwen3_4b_block7")
    out = model.generate(**inputs, assistant_model=draft)
"""

from transformers import AutoConfig, AutoModel

from .configuration_dspark import DSparkConfig
from .generation.hook import install, uninstall
from .modeling_dspark import DSparkDraftModel
from .stats import GenerateDSparkOutput, GenerationStats, RoundEvent, record_generation

AutoConfig.register(DSparkConfig.model_type, DSparkConfig)
AutoModel.register(DSparkConfig, DSparkDraftModel)
install()

__all__ = [
    "DSparkConfig",
    "DSparkDraftModel",
    "GenerateDSparkOutput",
    "GenerationStats",
    "RoundEvent",
    "install",
    "record_generation",
    "uninstall",
]
