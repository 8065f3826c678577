"""The zoo: architectures from ``transformers`` in tiny random configurations, nothing is downloaded.

``ZOO[name]()`` seeds torch and gives ``(model, kwargs)``; arguments replace sizes of its configuration. The model is in
train mode, every probability of dropout is 0, so that two runs agree; the inputs have padding in one row, and labels
where the model gives a loss.
A missing ``transformers`` is an error: it is a declared test dependency.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]
Builder = Callable[..., tuple[nn.Module, Inputs]]

BATCH, LENGTH, VOCAB, PADDED = 2, 12, 96, 4
SEED = 0
WEIGHT_SCALE = 0.1  # of the order of 1/sqrt(width)
#: parts of the names of configuration entries that make a forward random
RANDOM = ("dropout", "pdrop", "drop_path", "layerdrop", "drop_rate", "jitter", "mask_time_prob", "mask_feature_prob")
#: what most configurations call their sizes
TEXT = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip


# ------------------------------------------------------------------------------------------------ models


def build(arch: str, attention: str | None, /, **sizes: Any) -> nn.Module:
    """A model class of ``transformers`` by name, from its configuration with ``sizes``."""
    import transformers

    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, arch)
    config = cls.config_class(**sizes)
    _adapt(config)
    if attention is not None:
        config._attn_implementation = attention
    torch.manual_seed(SEED)
    model: nn.Module = cls(config)
    return model.train()


def _adapt(config: Any) -> None:
    """No dropout, and weights large enough for layers to matter beside the residual stream; nested ones too."""
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and any(part in key for part in RANDOM):
            setattr(config, key, 0.0)
        elif key in ("initializer_range", "init_std"):
            setattr(config, key, WEIGHT_SCALE)
        elif hasattr(value, "to_dict"):
            _adapt(value)


# ------------------------------------------------------------------------------------------------ inputs


def tokens(side: str = "right") -> Inputs:
    """Token ids and a mask; the last row has padding on one side."""
    torch.manual_seed(SEED + 1)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH))
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[-1, slice(-PADDED, None) if side == "right" else slice(PADDED)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def language_model(inputs: Inputs) -> Inputs:
    """The tokens themselves as labels; padding, and what would be guessed from padding alone, is left out."""
    mask = inputs["attention_mask"]
    return {**inputs, "labels": inputs["input_ids"].masked_fill(mask * mask.roll(1, dims=1) == 0, -100)}


def pixels() -> Tensor:
    """A batch of images."""
    torch.manual_seed(SEED + 1)
    return torch.randn(BATCH, 3, 32, 32)


def targets(length: int = 8) -> Tensor:
    """Labels of a decoder; the last row is shorter."""
    torch.manual_seed(SEED + 2)
    labels = torch.randint(3, VOCAB, (BATCH, length))
    labels[-1, -2:] = -100
    return labels


# ---------------------------------------------------------------------------------------------- builders


def text(arch: str, attention: str | None = None, /, **sizes: Any) -> tuple[nn.Module, Inputs]:
    """An encoder of tokens with a head that guesses masked ones."""
    return build(arch, attention, **TEXT | sizes), language_model(tokens())


def causal(arch: str, attention: str | None = None, /, **sizes: Any) -> tuple[nn.Module, Inputs]:
    """A decoder. Padding stands on the left, as for generation, so that some queries see nothing but masked keys."""
    model = build(arch, attention, **TEXT | sizes)
    model.loss_type = "ForCausalLM"  # GPT-2's class name does not tell: it would log a warning, which breaks the graph
    return model, language_model(tokens("left"))


def translation(arch: str, attention: str | None = None, /, **sizes: Any) -> tuple[nn.Module, Inputs]:
    """An encoder and a decoder."""
    ids = dict(vocab_size=VOCAB, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
    return build(arch, attention, **ids | sizes), {**tokens(), "labels": targets()}


def images(arch: str, attention: str | None = None, /, **sizes: Any) -> tuple[nn.Module, Inputs]:
    """A classifier of images."""
    model = build(arch, attention, num_labels=5, problem_type="single_label_classification", **sizes)
    return model, {"pixel_values": pixels(), "labels": torch.tensor([1, 3])}


def segmentation(arch: str, attention: str | None = None, /, **sizes: Any) -> tuple[nn.Module, Inputs]:
    """A class for each pixel."""
    model = build(arch, attention, num_labels=5, **sizes)
    return model, {"pixel_values": pixels(), "labels": torch.arange(BATCH * 32 * 32).view(BATCH, 32, 32) % 5}


def spectrogram(arch: str, attention: str | None = None, /, **sizes: Any) -> tuple[nn.Module, Inputs]:
    """Speech to text from mel features."""
    model = build(arch, attention, **sizes)
    torch.manual_seed(SEED + 1)
    return model, {"input_features": torch.randn(BATCH, 16, 40), "labels": targets()}


def waveform(arch: str, attention: str | None = None, /, **sizes: Any) -> tuple[nn.Module, Inputs]:
    """Speech to text from samples, with the CTC loss; the second recording is shorter."""
    model = build(arch, attention, **sizes)
    torch.manual_seed(SEED + 1)
    mask = torch.ones(BATCH, 400, dtype=torch.long)
    mask[-1, 320:] = 0
    return model, {"input_values": torch.randn(BATCH, 400) * mask, "attention_mask": mask, "labels": targets(4)}


def image_and_text(arch: str, attention: str | None = None, /, **sizes: Any) -> tuple[nn.Module, Inputs]:
    """Two towers and a contrastive loss."""
    model = build(arch, attention, **sizes)
    return model, {**tokens(), "pixel_values": pixels(), "return_loss": True}


# ------------------------------------------------------------------------------------------------ the zoo

SMALL_ENCODER_DECODER = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                             decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
                             max_position_embeddings=64)  # fmt: skip
SMALL_VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32,
                    patch_size=8)  # fmt: skip
SMALL_STAGES = dict(hidden_sizes=[16, 32], depths=[1, 1])
SMALL_SPEECH = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    conv_dim=[16, 16], conv_kernel=[10, 4], conv_stride=[5, 4], num_feat_extract_layers=2,
                    num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, ctc_loss_reduction="mean",
                    pad_token_id=0)  # fmt: skip
SMALL_T5 = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
SMALL_GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
TWO_HEADS_OF_KEYS = dict(num_key_value_heads=2)
MIXTURE = dict(num_local_experts=4, **TWO_HEADS_OF_KEYS)

ZOO: dict[str, Builder] = {
    # encoders
    "bert-eager": partial(text, "BertForMaskedLM", "eager"),
    "bert-sdpa": partial(text, "BertForMaskedLM", "sdpa"),
    "roberta": partial(text, "RobertaForMaskedLM", "sdpa", type_vocab_size=1),
    "deberta-v2": partial(text, "DebertaV2ForMaskedLM", "eager", relative_attention=True, position_biased_input=False,
                          pos_att_type=["p2c", "c2p"], max_relative_positions=16),
    "albert": partial(text, "AlbertForMaskedLM", "sdpa", embedding_size=16),
    "electra": partial(text, "ElectraForMaskedLM", "eager", embedding_size=16),
    "distilbert": partial(text, "DistilBertForMaskedLM", "sdpa", dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    "modernbert": partial(text, "ModernBertForMaskedLM", "sdpa", local_attention=4, global_attn_every_n_layers=2,
                          cls_token_id=1, sep_token_id=2),
    "convbert": partial(text, "ConvBertForMaskedLM", embedding_size=32, conv_kernel_size=3, num_groups=1),
    "fnet": partial(text, "FNetForMaskedLM"),
    # decoders
    "gpt2-eager": partial(causal, "GPT2LMHeadModel", "eager", **SMALL_GPT2),
    "gpt2-sdpa": partial(causal, "GPT2LMHeadModel", "sdpa", **SMALL_GPT2),
    "llama-eager": partial(causal, "LlamaForCausalLM", "eager", **TWO_HEADS_OF_KEYS),
    "llama-sdpa": partial(causal, "LlamaForCausalLM", "sdpa", **TWO_HEADS_OF_KEYS),
    "mistral": partial(causal, "MistralForCausalLM", "sdpa", sliding_window=4, **TWO_HEADS_OF_KEYS),
    "qwen3": partial(causal, "Qwen3ForCausalLM", "sdpa", head_dim=8, **TWO_HEADS_OF_KEYS),
    "gemma2": partial(causal, "Gemma2ForCausalLM", "eager", head_dim=8, sliding_window=4, query_pre_attn_scalar=8,
                      **TWO_HEADS_OF_KEYS),
    "phi": partial(causal, "PhiForCausalLM", "sdpa"),
    "opt": partial(causal, "OPTForCausalLM", "eager", ffn_dim=64, word_embed_proj_dim=32),
    "bloom": partial(causal, "BloomForCausalLM", n_layer=2, n_head=4),
    "falcon-alibi": partial(causal, "FalconForCausalLM", "eager", alibi=True, new_decoder_architecture=False),
    "gpt-neox": partial(causal, "GPTNeoXForCausalLM", "eager"),
    "gptj": partial(causal, "GPTJForCausalLM", "eager", n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    # mixture of experts
    "mixtral-loop": partial(causal, "MixtralForCausalLM", "sdpa", experts_implementation="eager",
                            output_router_logits=True, **MIXTURE),
    "mixtral-batched": partial(causal, "MixtralForCausalLM", "eager", experts_implementation="batched_mm", **MIXTURE),
    # encoder and decoder
    "t5": partial(translation, "T5ForConditionalGeneration", **SMALL_T5),
    "t5-gated": partial(translation, "T5ForConditionalGeneration", feed_forward_proj="gated-gelu",
                        tie_word_embeddings=False, **SMALL_T5),
    "bart": partial(translation, "BartForConditionalGeneration", "sdpa", **SMALL_ENCODER_DECODER),
    "pegasus": partial(translation, "PegasusForConditionalGeneration", "eager", **SMALL_ENCODER_DECODER),
    "marian": partial(translation, "MarianMTModel", "sdpa", **SMALL_ENCODER_DECODER),
    # vision
    "vit-eager": partial(images, "ViTForImageClassification", "eager", **SMALL_VISION),
    "vit-sdpa": partial(images, "ViTForImageClassification", "sdpa", **SMALL_VISION),
    "convnext": partial(images, "ConvNextForImageClassification", num_stages=2, **SMALL_STAGES),
    "resnet": partial(images, "ResNetForImageClassification", embedding_size=16, **SMALL_STAGES),
    "swin": partial(images, "SwinForImageClassification", image_size=32, patch_size=2, embed_dim=16, depths=[2, 1],
                    num_heads=[2, 4], window_size=4),
    "segformer": partial(segmentation, "SegformerForSemanticSegmentation", num_encoder_blocks=2, depths=[1, 1],
                         sr_ratios=[4, 2], hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2],
                         num_attention_heads=[2, 4], mlp_ratios=[2, 2], decoder_hidden_size=32),
    # speech
    "whisper": partial(spectrogram, "WhisperForConditionalGeneration", "sdpa", vocab_size=VOCAB, num_mel_bins=16,
                       max_source_positions=20, max_target_positions=16, pad_token_id=0, bos_token_id=1,
                       eos_token_id=2, decoder_start_token_id=1, **SMALL_ENCODER_DECODER),
    "wav2vec2": partial(waveform, "Wav2Vec2ForCTC", "eager", **SMALL_SPEECH),
    "hubert": partial(waveform, "HubertForCTC", "sdpa", **SMALL_SPEECH),
    # images and text
    "clip": partial(image_and_text, "CLIPModel", "sdpa", text_config=TEXT, vision_config=SMALL_VISION,
                    projection_dim=16),
    # state spaces, recurrences and hybrids
    "mamba": partial(causal, "MambaForCausalLM", state_size=4, conv_kernel=4, expand=2),
    "mamba2": partial(causal, "Mamba2ForCausalLM", state_size=4, num_heads=8, head_dim=8, expand=2, n_groups=2,
                      chunk_size=4),
    "rwkv": partial(causal, "RwkvForCausalLM", context_length=64, attention_hidden_size=32),
    "bamba": partial(causal, "BambaForCausalLM", "sdpa", mamba_n_heads=8, mamba_d_head=8, mamba_d_state=4,
                     mamba_n_groups=2, mamba_chunk_size=4, attn_layer_indices=[1], **TWO_HEADS_OF_KEYS),
    "recurrent-gemma": partial(causal, "RecurrentGemmaForCausalLM", "sdpa", lru_width=32, attention_window_size=8,
                               num_hidden_layers=3),
}  # fmt: skip
