"""Single checkpoint files in the original layout, written from the real ldm networks, loaded by the standalone host."""
from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("ldm", reason="stable-diffusion-sdkit is not installed")

from builders import randomise

from lib_onediff.demo import tokenizer as clip_tokenizer
from lib_onediff.demo.errors import ModelProblem
from lib_onediff.demo.models import load_model
from lib_onediff.demo.tokenizer import BYTE_TOKENS

TEXT_WIDTH = 64
SD1 = {"context_dim": TEXT_WIDTH, "num_heads": 8, "model_channels": 32}
SD2 = {"context_dim": TEXT_WIDTH, "num_head_channels": 64, "model_channels": 64, "use_linear_in_transformer": True}
INPAINTING = {**SD1, "in_channels": 9}
REFINER = {**SD2, "attention_resolutions": [4, 2], "transformer_depth": 2, "context_dim": [TEXT_WIDTH] * 2}


def ldm_unet(**config: Any) -> nn.Module:
    from ldm.modules.diffusionmodules.openaimodel import UNetModel

    standard = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "num_res_blocks": 2, "channel_mult": [1, 2, 4, 4],
        "attention_resolutions": [4, 2, 1], "use_spatial_transformer": True, "transformer_depth": 1, "legacy": False,
        "use_checkpoint": False,
    }
    return randomise(UNetModel(**{**standard, **config}))


def ldm_vae() -> nn.Module:
    from ldm.modules.diffusionmodules.model import Decoder, Encoder

    config = {
        "double_z": True, "z_channels": 4, "resolution": 64, "in_channels": 3, "out_ch": 3, "ch": 32,
        "ch_mult": [1, 2, 2, 2], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0, "attn_type": "vanilla",
    }
    vae = nn.Module()
    vae.encoder, vae.decoder = Encoder(**config), Decoder(**config)
    vae.quant_conv, vae.post_quant_conv = nn.Conv2d(8, 8, 1), nn.Conv2d(4, 4, 1)
    return randomise(vae)


def clip_text() -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    return randomise(CLIPTextModel(CLIPTextConfig(
        vocab_size=BYTE_TOKENS, hidden_size=TEXT_WIDTH, intermediate_size=4 * TEXT_WIDTH, num_hidden_layers=2,
        num_attention_heads=1, bos_token_id=BYTE_TOKENS - 2, eos_token_id=BYTE_TOKENS - 1,
    )))


def open_clip_text(layers: int = 3, width: int = TEXT_WIDTH) -> dict[str, Tensor]:
    """Random weights of an OpenCLIP text encoder, by OpenCLIP's names."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": (BYTE_TOKENS, width), "positional_embedding": (77, width),
        "ln_final.weight": (width,), "ln_final.bias": (width,), "text_projection": (width, width),
    }
    for layer in range(layers):
        block = f"transformer.resblocks.{layer}."
        shapes.update({f"{block}{norm}.{kind}": (width,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")})
        shapes.update({
            f"{block}attn.in_proj_weight": (3 * width, width), f"{block}attn.in_proj_bias": (3 * width,),
            f"{block}attn.out_proj.weight": (width, width), f"{block}attn.out_proj.bias": (width,),
            f"{block}mlp.c_fc.weight": (4 * width, width), f"{block}mlp.c_fc.bias": (4 * width,),
            f"{block}mlp.c_proj.weight": (width, 4 * width), f"{block}mlp.c_proj.bias": (width,),
        })
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def checkpoint(unet: nn.Module, text: dict[str, Tensor]) -> dict[str, Tensor]:
    """A whole checkpoint; text has its full names already."""
    parts = {"model.diffusion_model.": unet.state_dict(), "first_stage_model.": ldm_vae().state_dict(), "": text}
    return {prefix + name: value.contiguous() for prefix, part in parts.items() for name, value in part.items()}


def named(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in weights.items()}


def write(folder: Path, weights: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    """Write a checkpoint, and a byte tokenizer beside it."""
    place = folder / "tokenizer"
    place.mkdir()
    clip_tokenizer.write_vocabulary(place, [])
    file = folder / name
    if name.endswith(".ckpt"):
        torch.save({"state_dict": weights, "global_step": 1}, file)
    else:
        save_file(weights, file)
    return file


def sd1_weights(unet: nn.Module | None = None) -> dict[str, Tensor]:
    return checkpoint(unet or ldm_unet(**SD1), named("cond_stage_model.transformer.", clip_text().state_dict()))


def assert_same_unet(loaded: Any, original: nn.Module, channels: int = 4, **labels: Any) -> None:
    """Both UNets, in their own ways of being called, must answer alike."""
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(2, channels, 16, 16, generator=generator)
    context = torch.randn(2, 77, TEXT_WIDTH, generator=generator)
    time = torch.tensor([10.0, 700.0])
    with torch.no_grad():
        expected = original(latent, timesteps=time, context=context)
        given = loaded(latent, time, context).sample
    assert torch.linalg.norm(given - expected) / torch.linalg.norm(expected) < 1e-5


@pytest.mark.parametrize("name", ["model.safetensors", "model.ckpt"])
def test_sd1_checkpoint(tmp_path: Path, name: str) -> None:
    unet = ldm_unet(**SD1)
    model = load_model(str(write(tmp_path, sd1_weights(unet), name)))
    assert model.name == "model"
    assert_same_unet(model.unet, unet)
    assert model.scheduler_config["prediction_type"] == "epsilon"

    latent = torch.randn(1, 4, 8, 8)
    tokens = torch.randint(0, BYTE_TOKENS - 2, (1, 77))
    vae = ldm_vae()
    with torch.no_grad():
        assert torch.allclose(
            model.pipeline.vae.decode(latent).sample, vae.decoder(vae.post_quant_conv(latent)), atol=1e-4, rtol=1e-4
        )
        assert torch.allclose(
            model.pipeline.text_encoder(tokens).last_hidden_state, clip_text()(tokens).last_hidden_state, atol=1e-5
        )


def test_sd2_checkpoint_predicts_v(tmp_path: Path) -> None:
    unet = ldm_unet(**SD2)
    weights = checkpoint(unet, named("cond_stage_model.model.", open_clip_text()))
    file = write(tmp_path, weights)
    model = load_model(str(file))
    assert_same_unet(model.unet, unet)
    assert model.scheduler_config["prediction_type"] == "v_prediction"
    assert model.pipeline.text_encoder.config.num_hidden_layers == 2

    file.with_suffix(".yaml").write_text("model:\n  params:\n    parameterization: eps\n")
    assert load_model(str(file)).scheduler_config["prediction_type"] == "epsilon"
    file.with_suffix(".yaml").write_text('model:\n  params:\n    parameterization: "v"\n')
    assert load_model(str(file)).scheduler_config["prediction_type"] == "v_prediction"


def test_inpainting_checkpoint(tmp_path: Path) -> None:
    unet = ldm_unet(**INPAINTING)
    model = load_model(str(write(tmp_path, sd1_weights(unet))))
    assert model.takes_mask
    assert type(model.pipeline).__name__ == "StableDiffusionInpaintPipeline"
    assert_same_unet(model.unet, unet, channels=9)


def test_refiner_checkpoint(tmp_path: Path) -> None:
    weights = checkpoint(ldm_unet(**REFINER), named("conditioner.embedders.0.model.", open_clip_text()))
    sizes = {"0.0": (256, TEXT_WIDTH + 5 * 256), "0.2": (256, 256)}
    for layer, shape in sizes.items():
        weights[f"model.diffusion_model.label_emb.{layer}.weight"] = torch.randn(shape)
        weights[f"model.diffusion_model.label_emb.{layer}.bias"] = torch.zeros(shape[0])
    model = load_model(str(write(tmp_path, weights)))
    assert model.is_refiner
    assert model.unet.config.transformer_layers_per_block == [1, 2, 2, 2]


def test_loaded_checkpoint_makes_a_picture(tmp_path: Path) -> None:
    pipeline = load_model(str(write(tmp_path, sd1_weights()))).pipeline
    image = pipeline("a fox", width=64, height=64, num_inference_steps=1, output_type="np").images[0]
    assert image.shape == (64, 64, 3)


def assert_refused(file: Path, *parts: str) -> None:
    with pytest.raises(ModelProblem) as caught:
        load_model(str(file))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("prefix, part", [("first_stage_model.", "VAE"), ("cond_stage_model.", "text encoder")])
def test_incomplete_checkpoint(tmp_path: Path, prefix: str, part: str) -> None:
    kept = {name: value for name, value in sd1_weights().items() if not name.startswith(prefix)}
    assert_refused(write(tmp_path, kept), f"no {part}")


def test_checkpoint_with_blocks_left_out(tmp_path: Path) -> None:
    kept = {name: value for name, value in sd1_weights().items() if ".middle_block.1." not in name}
    assert_refused(write(tmp_path, kept), "blocks left out")


def test_checkpoint_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_tokenizer, "CACHED_REPOSITORIES", ())
    monkeypatch.setattr(clip_tokenizer, "PACKAGES_WITH_ARCHIVE", ())
    file = write(tmp_path, sd1_weights())
    (tmp_path / "tokenizer" / "merges.txt").unlink()
    assert_refused(file, "holds no tokenizer", "vocab.json and merges.txt beside it")


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    file = write(tmp_path, sd1_weights())
    vocabulary = {f"token{index}": index for index in range(BYTE_TOKENS + 1)}
    (tmp_path / "tokenizer" / "vocab.json").write_text(json.dumps(vocabulary))
    assert_refused(file, "do not belong together")


def test_vocabulary_from_the_published_list_of_merges(tmp_path: Path) -> None:
    """The archive's layout: a header, then merges; the vocabulary is bytes, bytes ending a word, merges, two marks."""
    with gzip.open(tmp_path / clip_tokenizer.MERGES_ARCHIVE, "wt", encoding="utf-8") as lines:
        lines.write("header\ni n\nt h\nth e</w>\n")
    (tmp_path / "out").mkdir()
    clip_tokenizer.copy_vocabulary(tmp_path / "model.safetensors", tmp_path / "out")
    vocabulary = json.loads((tmp_path / "out" / "vocab.json").read_text(encoding="utf-8"))
    assert vocabulary["in"] == 512 and vocabulary["the</w>"] == 514
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer(str(tmp_path / "out" / "vocab.json"), str(tmp_path / "out" / "merges.txt"))
    assert tokenizer("the", add_special_tokens=False).input_ids == [514]
