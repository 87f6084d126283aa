"""The layouts that OneDiff reads from UNets: which of them are the same architecture, and which UNets are refused."""
from __future__ import annotations

from typing import Any

import pytest
from builders import (
    LAYOUTS,
    LDM_LAYOUTS,
    SD1,
    diffusers_structure,
    ldm_structure,
)
from grid import name_of

from lib_onediff.core.refusal import Refusal
from lib_onediff.families.registry import FAMILIES


def test_different_configurations_have_different_architectures_and_equal_ones_equal_layouts() -> None:
    """`architecture` is a digest of the layout, by which networks share entries of the table of shapes. It also differs
    if only numbers without parameters do, such as an epsilon. Two UNets built from one configuration have equal
    layouts."""
    plain = [*LAYOUTS.values(), {**SD1, "attention_head_dim": 4}, {**SD1, "norm_eps": 1e-6}, {**SD1, "freq_shift": 1},
             {**SD1, "flip_sin_to_cos": False}]
    builders = [lambda config=config: diffusers_structure(config) for config in plain]
    builders += [lambda config=config: ldm_structure(config) for config in [*LDM_LAYOUTS.values(), {"num_heads": 4}]]
    layouts = [FAMILIES.read(build()) for build in builders]
    assert len({layout.architecture for layout in layouts}) == len(layouts)
    assert layouts == [FAMILIES.read(build()) for build in builders]


DIFFUSERS_REFUSALS = [
    ({"num_class_embeds": 5}, "it has class labels"),
    ({"class_embed_type": "timestep"}, "it has class labels"),
    ({"center_input_sample": True}, "class labels or prepares its inputs in an unusual way"),
    ({"time_embedding_act_fn": "silu"}, "class labels or prepares its inputs in an unusual way"),
    ({"timestep_post_act": "silu"}, "its post_act is SiLU"),
    ({"time_embedding_type": "fourier"}, "its time projection or output norm is of an unknown kind"),
    ({"act_fn": "gelu"}, "is GELU instead of SiLU"),
    ({"resnet_time_scale_shift": "scale_shift"}, "its time_embedding_norm is scale_shift"),
    ({"mid_block_scale_factor": 2.0}, "mid_block.resnets.0 is .*its output_scale_factor is 2.0"),
    ({"dual_cross_attention": True}, "is a .*DualTransformer2DModel"),
    ({"only_cross_attention": True}, "its only_cross_attention is True"),
    ({"encoder_hid_dim": 24, "encoder_hid_dim_type": "text_proj"}, "its prompt passes through a projection"),
    ({"addition_embed_type": "text"}, "its extra embedding is of type text"),
    ({"attention_type": "gated"}, "it has unknown parameters"),
    ({"downsample_padding": 0}, "its padding is 0"),
    ({"down_block_types": ("AttnDownBlock2D", "DownBlock2D", "DownBlock2D", "DownBlock2D"),
      "up_block_types": ("UpBlock2D", "UpBlock2D", "UpBlock2D", "CrossAttnUpBlock2D")}, "AttnDownBlock2D"),
    ({"down_block_types": ("DownBlock2D",) * 4, "up_block_types": ("UpBlock2D",) * 4,
      "mid_block_type": "UNetMidBlock2D"}, "the UNet has no cross attention"),
]
LDM_REFUSALS = [
    ({"num_classes": 5}, "class-conditional"), ({"num_classes": "continuous"}, "class-conditional"),
    ({"use_scale_shift_norm": True}, "is a residual block with use_scale_shift_norm"),
    ({"resblock_updown": True}, "is a residual block with updown"), ({"n_embed": 8}, "the UNet predicts codebook ids"),
    ({"conv_resample": False}, "its use_conv is False"),
    ({"disable_self_attentions": [True] * 4}, "the transformer block .* lacks an attention"),
    ({"use_spatial_transformer": False, "context_dim": None}, "AttentionBlock"),
]


@pytest.mark.parametrize(("structure", "config", "reason"), [
    *((diffusers_structure, config, reason) for config, reason in DIFFUSERS_REFUSALS),
    *((ldm_structure, config, reason) for config, reason in LDM_REFUSALS),
], ids=name_of)
def test_an_unsupported_architecture_is_refused_in_one_line(
    structure: Any, config: dict[str, Any], reason: str
) -> None:
    """structure, config: a diffusers or ldm UNet of SD 1.5's configuration with these changes. reason: a pattern in the
    message."""
    unet = structure({**SD1, **config} if structure is diffusers_structure else config)
    with pytest.raises(Refusal, match=reason) as refusal:
        FAMILIES.read(unet)
    assert "\n" not in str(refusal.value)
