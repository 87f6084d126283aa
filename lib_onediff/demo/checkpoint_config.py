"""The diffusers configuration of an original Stable Diffusion checkpoint, derived from the shapes of its weights."""
from __future__ import annotations

from typing import Any

from .errors import ModelProblem

Shapes = dict[str, tuple[int, ...]]

UNET, VAE = "model.diffusion_model.", "first_stage_model."
CLIP = "text_model."
OPEN_CLIP = "transformer.resblocks."
HEAD_WIDTH = 64
SD1_HEADS = 8
SDXL_SIZE_EMBEDDING = 256
# The noise schedule that all of Stable Diffusion 1, 2 and XL were trained with.
TRAINING_SCHEDULE: dict[str, Any] = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False,
    "set_alpha_to_one": False, "steps_offset": 1,
}


def component_configs(shapes: Shapes, v_prediction: bool) -> dict[str, dict[str, Any]]:
    """{"model_index": ..., "unet": ..., "vae": ..., "scheduler": ..., "text_encoder": ...}.

    shapes: of every weight in the checkpoint, by name.
    """
    unet = unet_config(shapes)
    xl = unet["addition_embed_type"] is not None
    texts = text_configs(shapes)
    classes = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "scheduler": "DDIMScheduler"}
    index: dict[str, Any] = {"_class_name": pipeline_class(unet, texts, xl)}
    index.update({part: ["diffusers", kind] for part, kind in classes.items()})
    index.update({part: ["transformers", text["architectures"][0]] for part, text in texts.items()})
    index.update({part.replace("text_encoder", "tokenizer"): ["transformers", "CLIPTokenizer"] for part in texts})
    if xl and "text_encoder" not in texts:
        index.update(text_encoder=[None, None], tokenizer=[None, None], requires_aesthetics_score=True)
    if not xl:
        index.update(safety_checker=[None, None], feature_extractor=[None, None], requires_safety_checker=False)
    return {
        "model_index": index,
        "unet": unet,
        "vae": vae_config(shapes, xl),
        "scheduler": {
            "_class_name": "DDIMScheduler", **TRAINING_SCHEDULE,
            "prediction_type": "v_prediction" if v_prediction else "epsilon",
        },
        **texts,
    }


def pipeline_class(unet: dict[str, Any], texts: dict[str, Any], xl: bool) -> str:
    """The diffusers pipeline for a UNet: by family, and by what it takes beside the latent."""
    family = "StableDiffusionXL" if xl else "StableDiffusion"
    if unet["in_channels"] == 9:
        return family + "InpaintPipeline"
    if unet["in_channels"] != 4:
        raise ModelProblem(f"This checkpoint's UNet takes {unet['in_channels']} channels; this host runs 4 and 9.")
    return family + ("Pipeline" if "text_encoder" in texts else "Img2ImgPipeline")


def unet_config(shapes: Shapes) -> dict[str, Any]:
    """The configuration of UNet2DConditionModel."""
    levels: list[list[tuple[int, int]]] = [[]]
    for index in range(1, 1 + count(shapes, UNET + "input_blocks.{}.0.")):
        block = f"{UNET}input_blocks.{index}."
        if f"{block}0.op.weight" in shapes:
            levels.append([])
        elif f"{block}0.in_layers.2.weight" in shapes:
            width = shapes[f"{block}0.in_layers.2.weight"][0]
            levels[-1].append((width, count(shapes, block + "1.transformer_blocks.{}.")))
    channels = [level[-1][0] for level in levels]
    depths = [level[-1][1] for level in levels]
    middle_depth = count(shapes, UNET + "middle_block.1.transformer_blocks.{}.")
    check_regular(shapes, levels, middle_depth)

    first = next(name for name in shapes if name.startswith(UNET) and name.endswith("attn2.to_k.weight"))
    linear = len(shapes[first.split("transformer_blocks")[0] + "proj_in.weight"]) == 2
    label = shapes.get(UNET + "label_emb.0.0.weight")
    kinds = ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths]
    return {
        "_class_name": "UNet2DConditionModel", "sample_size": 128 if label else 64,
        "in_channels": shapes[UNET + "input_blocks.0.0.weight"][1], "out_channels": shapes[UNET + "out.2.weight"][0],
        "block_out_channels": channels, "layers_per_block": len(levels[0]), "down_block_types": kinds,
        "up_block_types": [kind.replace("Down", "Up") for kind in reversed(kinds)],
        "transformer_layers_per_block": [*(depth or 1 for depth in depths[:-1]), middle_depth],
        "cross_attention_dim": shapes[first][1],
        # diffusers calls the number of heads attention_head_dim.
        "attention_head_dim": [max(1, width // HEAD_WIDTH) for width in channels] if linear else SD1_HEADS,
        "use_linear_projection": linear,
        "upcast_attention": linear and label is None,
        "addition_embed_type": "text_time" if label else None,
        "addition_time_embed_dim": SDXL_SIZE_EMBEDDING if label else None,
        "projection_class_embeddings_input_dim": label[1] if label else None,
    }


def check_regular(shapes: Shapes, levels: list[list[tuple[int, int]]], middle_depth: int) -> None:
    """Raise ModelProblem for UNets with blocks left out: their files do not say what diffusers needs to know."""
    depth_of_last = levels[-1][-1][1]
    same = all(len(level) == len(levels[0]) and len(set(level)) == 1 for level in levels)
    ups = [
        count(shapes, f"{UNET}output_blocks.{index}.1." + "transformer_blocks.{}.")
        for index in range(count(shapes, UNET + "output_blocks.{}.0."))
    ]
    expected = [level[-1][1] for level in reversed(levels) for _ in range(len(level) + 1)]
    if not same or ups != expected or depth_of_last not in (0, middle_depth) or not middle_depth:
        raise ModelProblem(
            "This checkpoint's UNet has blocks left out or changed; this host reads such a model from a folder in "
            "diffusers' layout."
        )


def vae_config(shapes: Shapes, xl: bool) -> dict[str, Any]:
    """The configuration of AutoencoderKL."""
    down = VAE + "encoder.down."
    levels = count(shapes, down + "{}.block.0.")
    return {
        "_class_name": "AutoencoderKL", "sample_size": 1024 if xl else 512,
        "block_out_channels": [shapes[f"{down}{level}.block.0.conv1.weight"][0] for level in range(levels)],
        "layers_per_block": count(shapes, down + "0.block.{}."),
        "down_block_types": ["DownEncoderBlock2D"] * levels, "up_block_types": ["UpDecoderBlock2D"] * levels,
        "latent_channels": shapes[VAE + "decoder.conv_in.weight"][1],
        "scaling_factor": 0.13025 if xl else 0.18215, "force_upcast": xl,
    }


def text_configs(shapes: Shapes) -> dict[str, dict[str, Any]]:
    """The configurations of the text encoders, by the pipeline's names for them."""
    if "conditioner.embedders.1.model.token_embedding.weight" in shapes:
        return {
            "text_encoder": clip_config(shapes, "conditioner.embedders.0.transformer."),
            "text_encoder_2": open_clip_config(shapes, "conditioner.embedders.1.model.", projected=True),
        }
    if "conditioner.embedders.0.model.token_embedding.weight" in shapes:
        return {"text_encoder_2": open_clip_config(shapes, "conditioner.embedders.0.model.", projected=True)}
    if "cond_stage_model.model.token_embedding.weight" in shapes:
        return {"text_encoder": open_clip_config(shapes, "cond_stage_model.model.", projected=False)}
    if f"cond_stage_model.transformer.{CLIP}embeddings.token_embedding.weight" in shapes:
        return {"text_encoder": clip_config(shapes, "cond_stage_model.transformer.")}
    raise ModelProblem("This checkpoint's text encoder is not one of Stable Diffusion 1.x, 2.x or XL.")


def clip_config(shapes: Shapes, prefix: str) -> dict[str, Any]:
    """CLIP-L's configuration."""
    vocabulary, width = shapes[f"{prefix}{CLIP}embeddings.token_embedding.weight"]
    layers = count(shapes, f"{prefix}{CLIP}encoder.layers." + "{}.")
    inner = shapes[f"{prefix}{CLIP}encoder.layers.0.mlp.fc1.weight"][0]
    return text_config("CLIPTextModel", vocabulary, width, layers, inner, "quick_gelu")


def open_clip_config(shapes: Shapes, prefix: str, projected: bool) -> dict[str, Any]:
    """The configuration of OpenCLIP's H (SD2: without its last layer, which is not used) or bigG (SDXL)."""
    vocabulary, width = shapes[f"{prefix}token_embedding.weight"]
    layers = count(shapes, f"{prefix}{OPEN_CLIP}" + "{}.") - (0 if projected else 1)
    inner = shapes[f"{prefix}{OPEN_CLIP}0.mlp.c_fc.weight"][0]
    kind = "CLIPTextModelWithProjection" if projected else "CLIPTextModel"
    return text_config(kind, vocabulary, width, layers, inner, "gelu")


def text_config(kind: str, vocabulary: int, width: int, layers: int, inner: int, activation: str) -> dict[str, Any]:
    return {
        "architectures": [kind], "model_type": "clip_text_model", "hidden_act": activation,
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner, "projection_dim": width,
        "num_hidden_layers": layers, "num_attention_heads": max(1, width // HEAD_WIDTH),
        "max_position_embeddings": 77, "bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1,
        "pad_token_id": vocabulary - 1,
    }


def count(shapes: Shapes, pattern: str) -> int:
    """How many different numbers stand in the place of {} in names that start with pattern, counting from the least."""
    before, after = pattern.split("{}")
    numbers = {name[len(before) :].split(".")[0] for name in shapes if name.startswith(before)}
    return sum(1 for number in numbers if number.isdigit() and any(
        name.startswith(f"{before}{number}{after}") for name in shapes
    ))
