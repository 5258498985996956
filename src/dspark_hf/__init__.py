"""DSpark speculative decoding inside Transformers' `generate()`.

Importing the package is all the set-up there is:

    import dspark_hf
    draft = dspark_hf.DSparkDraftModel.from_pretrained("deepseek-ai/dspark_qwen3_4b_block7")
    out = model.generate(**inputs, assistant_model=draft)
"""

from transformers import AutoConfig, AutoModel

from .confidence_metrics import ConfidenceRecord, measure_confidence
from .configuration_dspark import DSparkConfig
from .generation.candidate_generator import DSparkCandidateGenerator
from .generation.hook import decoder, install, uninstall
from .generation.logits_process import DSparkLogitsProcessor
from .generation.profiling import throughput_profile
from .modeling_dspark import DSparkDraftModel
from .scheduling import throughput_lengths
from .stats import GenerateDSparkOutput, GenerationStats, RoundEvent, record_generation
from .throughput import ThroughputProfile

AutoConfig.register(DSparkConfig.model_type, DSparkConfig)
AutoModel.register(DSparkConfig, DSparkDraftModel)
install()

__all__ = [
    "ConfidenceRecord",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDraftModel",
    "DSparkLogitsProcessor",
    "GenerateDSparkOutput",
    "GenerationStats",
    "RoundEvent",
    "ThroughputProfile",
    "decoder",
    "install",
    "measure_confidence",
    "record_generation",
    "throughput_lengths",
    "throughput_profile",
    "uninstall",
]
