"""Classes that make vectors and scores alone -> the file of their family; a part of registry.FAMILIES.

Many encoders were saved with the head of their training (`...ForMaskedLM`, `...ForPreTraining`), which is not read.
Thread: any; a table.
"""

from __future__ import annotations

VECTORS_AND_SCORES = ("Model", "ForSequenceClassification")
ALL = (*VECTORS_AND_SCORES, "ForTokenClassification", "ForMaskedLM")
CLASSES = {  # how a family's classes begin -> its module, how they end
    "Bert": ("bert", ALL),
    "Roberta": ("roberta", ALL),
    "XLMRoberta": ("xlm_roberta", ALL),
    "Camembert": ("roberta", ALL),
    "DistilBert": ("distilbert", ALL),
    "Electra": ("electra", (*ALL, "ForPreTraining")),
    "Albert": ("albert", (*ALL, "ForPreTraining")),
    "MPNet": ("mpnet", ALL),
    "Deberta": ("deberta", ALL),
    "DebertaV2": ("deberta_v2", ALL),
    "ModernBert": ("modernbert", ALL),
    "JinaBert": ("jina_bert", ALL),
    "JinaEmbeddingsV3": ("jina_embeddings_v3", ALL),
    "NomicBert": ("nomic_bert", VECTORS_AND_SCORES),
    "New": ("gte", VECTORS_AND_SCORES),
    "Gte": ("gte", VECTORS_AND_SCORES),
}
ENCODERS = {
    f"{name}{ending}": f"engine.models.pooling.{module}"
    for name, (module, endings) in CLASSES.items()
    for ending in endings
} | {
    "XLMRobertaLoRA": "engine.models.pooling.xlm_roberta",
    "HF_ColBERT": "engine.models.pooling.colbert",
    "T5EncoderModel": "engine.models.pooling.t5",
    "MT5EncoderModel": "engine.models.pooling.t5",
    "CLIPModel": "engine.models.pooling.clip_model",
    "SiglipModel": "engine.models.pooling.siglip",
    "Siglip2Model": "engine.models.pooling.siglip2",
    "JinaVLForRanking": "engine.models.pooling.jina_vl",
    "ColPaliForRetrieval": "engine.models.pooling.colpali",
    "ColQwen2ForRetrieval": "engine.models.pooling.colqwen2",
}
