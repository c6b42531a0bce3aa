"""The checkpoint layout of vllm-project/speculators (commit c05b95b), to and from z-lab's: config.json and tensor names.

The drafter's own tensors bear the same names in both. speculators counts layers from the embedding's output, so its ids are
z-lab's plus one; vLLM takes the one off again (transformers_utils/configs/speculators/algos.py). What a server computes stays
the same: keys that speculators does not know, `is_causal` for one, stand in transformer_layer_config, whose entries vLLM
makes attributes of the draft's config.
"""

from collections.abc import Mapping, Sequence

from buffers.untrusted import shown

# What speculators keeps beside the drafter's tensors: the target's, and maps of a reduced vocabulary.
NOT_THE_DRAFTERS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
    "t2d",
    "d2t",
)

_OUTSIDE_THE_LAYERS = ("architectures", "auto_map", "block_size", "dflash_config")


def is_speculators(config: Mapping[str, object]) -> bool:
    """Whether a config.json is in speculators' layout."""
    return "speculators_model_type" in config


def to_speculators(
    config: Mapping[str, object], verifier: str, verifier_architectures: Sequence[str]
) -> dict[str, object]:
    """z-lab's config.json as speculators': `verifier` is the target's name or folder, which `vllm serve` loads.

    Raises ValueError for full layers that are causal inside a block: speculators has no word for them.
    """
    inner, kinds = config["dflash_config"], config["layer_types"]
    assert isinstance(inner, Mapping) and isinstance(kinds, Sequence)
    if config.get("is_causal") and "full_attention" in kinds:
        raise ValueError(
            f"is_causal: expected full layers that are not causal inside a block, found {list(kinds)} with is_causal true; "
            "speculators cannot say that. Export in z-lab's layout."
        )
    layers = {name: value for name, value in config.items() if name not in _OUTSIDE_THE_LAYERS}
    block_size = config["block_size"]
    assert isinstance(block_size, int)
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layers,
        "draft_vocab_size": config["vocab_size"],
        "target_hidden_size": config["hidden_size"],
        "block_size": block_size,
        "mask_token_id": inner["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in inner["target_layer_ids"]],
        "sliding_window_non_causal": config.get("is_causal") is False and "sliding_attention" in kinds,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": config["dtype"],
        "torch_dtype": config["torch_dtype"],
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": list(verifier_architectures)},
        },
    }


def from_speculators(config: Mapping[str, object], num_target_layers: int | None = None) -> dict[str, object]:
    """speculators' config.json as z-lab's. `num_target_layers`: the target's, where the file does not say.

    Raises ValueError for another algorithm, for slots that predict from the anchor on, and for what is no list of layers.
    """
    if config["speculators_model_type"] != "dflash":
        raise ValueError(
            f"speculators_model_type: expected 'dflash', found {shown(config['speculators_model_type'])}. Only plain DFlash "
            "drafters are trained here."
        )
    if config.get("sample_from_anchor"):
        raise ValueError(
            "sample_from_anchor: expected false, found true, which is not reproduced here. Use a plain DFlash drafter."
        )
    layers, taps = config.get("transformer_layer_config"), config.get("aux_hidden_state_layer_ids")
    if not isinstance(layers, Mapping):
        raise ValueError(
            f"transformer_layer_config: expected an object, found {shown(layers)}. Correct the drafter's config.json."
        )
    if not isinstance(taps, Sequence) or not all(type(i) is int for i in taps):
        raise ValueError(
            f"aux_hidden_state_layer_ids: expected a list of layer numbers, found {shown(taps)}. Correct the drafter's "
            "config.json."
        )
    found: dict[str, object] = {"num_target_layers": num_target_layers, **layers}
    if config.get("sliding_window_non_causal"):
        found.setdefault("is_causal", False)
    for name in ("draft_vocab_size", "target_hidden_size", "block_size"):
        found[name] = config.get(name)
    inner = {"mask_token_id": config.get("mask_token_id"), "target_layer_ids": [i - 1 for i in taps]}
    return found | {"architectures": ["DFlashDraftModel"], "dflash_config": inner}
