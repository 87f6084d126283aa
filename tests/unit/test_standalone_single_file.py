"""The demo loads single checkpoint files in the original layout. The tests write them from small networks of the real
ldm package."""
from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("ldm", reason="stable-diffusion-sdkit is not installed")

from builders import randomise
from tiny_model import BYTE_TOKENS, write_byte_vocabulary

from lib_onediff.core.refusal import Refusal
from lib_onediff.demo import models
from lib_onediff.demo.models import load_model

TEXT_WIDTH = 64
# Changes of the shipped configurations that make the networks of these tests small.
NARROW_TEXT = {
    "hidden_size": TEXT_WIDTH, "intermediate_size": 4 * TEXT_WIDTH, "vocab_size": BYTE_TOKENS, "num_hidden_layers": 2,
    "num_attention_heads": 1, "bos_token_id": BYTE_TOKENS - 2, "eos_token_id": BYTE_TOKENS - 1,
}
NARROW: dict[str, dict[str, Any]] = {
    "vae": {"block_out_channels": [32, 64, 64, 64]},
    "unet": {"block_out_channels": [32, 64, 128, 128], "cross_attention_dim": TEXT_WIDTH},
    "text_encoder": {**NARROW_TEXT, "pad_token_id": BYTE_TOKENS - 1},
}


@pytest.fixture(autouse=True)
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the configurations by those of the small networks."""
    configs = json.loads(models.CONFIGS.read_text(encoding="utf-8"))
    for part, changes in NARROW.items():
        configs["sd1"][f"{part}/config.json"].update(changes)
    (tmp_path / "configs.json").write_text(json.dumps(configs), encoding="utf-8")
    monkeypatch.setattr(models, "CONFIGS", tmp_path / "configs.json")


def ldm_unet() -> nn.Module:
    from ldm.modules.diffusionmodules.openaimodel import UNetModel

    return randomise(UNetModel(
        image_size=32, in_channels=4, out_channels=4, model_channels=32, num_res_blocks=2, channel_mult=[1, 2, 4, 4],
        attention_resolutions=[4, 2, 1], use_spatial_transformer=True, transformer_depth=1, legacy=False, num_heads=8,
        use_checkpoint=False, context_dim=TEXT_WIDTH,
    ))


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

    return randomise(CLIPTextModel(CLIPTextConfig(**NARROW_TEXT)))


def write(folder: Path, weights: dict[str, Tensor]) -> Path:
    """Write a checkpoint, and a byte-level tokenizer beside it. Returns its path."""
    place = folder / "tokenizer"
    place.mkdir()
    write_byte_vocabulary(place)
    save_file(weights, folder / "model.safetensors")
    return folder / "model.safetensors"


def sd1_weights(unet: nn.Module | None = None) -> dict[str, Tensor]:
    """All weights of a small SD 1 checkpoint, by name."""
    # transformers 5 leaves out a part of the names that checkpoints have.
    text = {name.removeprefix("text_model."): value for name, value in clip_text().state_dict().items()}
    parts = {
        "model.diffusion_model.": (unet or ldm_unet()).state_dict(), "first_stage_model.": ldm_vae().state_dict(),
        "cond_stage_model.transformer.text_model.": text,
    }
    return {prefix + name: value.contiguous() for prefix, part in parts.items() for name, value in part.items()}


def assert_same_unet(loaded: Any, original: nn.Module) -> None:
    """Assert that an ldm UNet and a diffusers UNet have the same output."""
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(2, 4, 16, 16, generator=generator)
    context = torch.randn(2, 77, TEXT_WIDTH, generator=generator)
    time = torch.tensor([10.0, 700.0])
    with torch.no_grad():
        expected = original(latent, timesteps=time, context=context)
        given = loaded(latent, time, context).sample
    assert torch.linalg.norm(given - expected) / torch.linalg.norm(expected) < 1e-5


def test_the_networks_of_an_sd1_checkpoint_are_close_to_the_original_networks(tmp_path: Path) -> None:
    """The outputs of UNet, VAE and text encoder are compared with those of ldm's and transformers' networks with the
    same weights."""
    unet = ldm_unet()
    model = load_model(str(write(tmp_path, sd1_weights(unet))))
    assert model.name == "model"
    assert_same_unet(model.unet, unet)
    assert model.pipeline.scheduler.config["prediction_type"] == "epsilon"

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


@pytest.mark.parametrize(("family", "marks", "yaml", "predicts"), [
    ("sd1", [], "", "epsilon"), ("sd2", [], "", "v_prediction"), ("sdxl", [], "", "epsilon"),
    ("sdxl", ["v_pred"], "", "v_prediction"),
    ("sd2", [], "model:\n  params:\n    parameterization: eps\n", "epsilon"),
    ("sd1", [], 'model:\n  params:\n    parameterization: "v"\n', "v_prediction"),
])
def test_a_checkpoints_family_and_prediction_type_are_found(
    family: str, marks: list[str], yaml: str, predicts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of the text encoder's weights tell the family, and a weight named "v_pred" the prediction type, which a
    .yaml file beside the checkpoint overrides. marks: more names of weights. yaml: the text of that file; "": there is
    none. predicts: the prediction type that diffusers' loader, replaced by the test, is given."""
    import diffusers

    found: list[Any] = []

    def from_single_file(kind: Any, path: str, config: str, **options: Any) -> None:
        found.append((kind.__name__, json.loads(Path(config, "scheduler", "scheduler_config.json").read_text())))

    for kind in ("StableDiffusionPipeline", "StableDiffusionXLPipeline"):
        monkeypatch.setattr(getattr(diffusers, kind), "from_single_file", classmethod(from_single_file))
    text = next(sign for sign, known in models.FAMILY_SIGNS.items() if known == family)
    weights = dict.fromkeys([models.UNET_SIGN, models.VAE_SIGN, text, *marks], torch.zeros(1, 4))
    file = write(tmp_path, {name: weight.clone() for name, weight in weights.items()})
    if yaml:
        file.with_suffix(".yaml").write_text(yaml)
    models.load_checkpoint(file, torch.float32)
    ((kind, scheduler),) = found
    assert kind == f"StableDiffusion{'XL' if family == 'sdxl' else ''}Pipeline"
    assert scheduler["prediction_type"] == predicts


@pytest.mark.parametrize("text", [
    "\n" * 60_000, " " * 60_000, "parameterization: " * 10_000, " \n" * 60_000 + "parameterization: v",
    "parameterization:" + " " * 60_000, 'parameterization: "v" #' + "#" * 60_000,
])
def test_reading_the_largest_yaml_file_is_fast(tmp_path: Path, text: str) -> None:
    """A regular expression in which blanks match line breaks takes minutes for such texts."""
    (tmp_path / "a.yaml").write_text(text)
    began = time.process_time()
    found = models.V_IN_YAML.search(models.read_text(tmp_path / "a.yaml", models.LARGEST_YAML)) is not None
    assert time.process_time() - began < 1
    assert found == (text.startswith('parameterization: "v"') or text.endswith("parameterization: v"))


@pytest.mark.parametrize("what", ["too large", "a named pipe", "a folder"])
def test_a_checkpoint_is_refused_if_its_yaml_file_is_too_large_or_not_a_regular_file(
    tmp_path: Path, what: str
) -> None:
    """As in A1111, a .yaml file beside the checkpoint says whether the model predicts v. The refusal names this
    file."""
    yaml = write(tmp_path, sd1_weights()).with_suffix(".yaml")
    if what == "a named pipe":
        pytest.importorskip("fcntl", reason="Windows has no such files")
        os.mkfifo(yaml)
    elif what == "a folder":
        yaml.mkdir()
    else:
        yaml.write_bytes(b"#" * (2 << 20))
    assert_refused(yaml.with_suffix(".safetensors"), "model.yaml in ")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no such files")
def test_a_named_pipe_in_place_of_a_vocabulary_file_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, sd1_weights())
    (tmp_path / "tokenizer" / "vocab.json").unlink()
    os.mkfifo(tmp_path / "tokenizer" / "vocab.json")
    assert_refused(file, "vocab.json in tokenizer is not a regular file")


def assert_refused(file: Path, *parts: str) -> None:
    """Assert that loading a file raises Refusal with these parts of its sentence."""
    with pytest.raises(Refusal) as caught:
        load_model(str(file))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("prefix, part", [
    ("first_stage_model.", "VAE"), ("cond_stage_model.", "text encoder"), ("model.diffusion_model.", "UNet"),
])
def test_a_checkpoint_without_one_of_its_parts_is_refused_with_that_parts_name(
    tmp_path: Path, prefix: str, part: str
) -> None:
    kept = {name: value for name, value in sd1_weights().items() if not name.startswith(prefix)}
    assert_refused(write(tmp_path, kept), f"no {part}")


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """merges.txt is missing beside the checkpoint, and the test leaves no tokenizer in Hugging Face's cache."""
    monkeypatch.setattr(models, "CACHED", ())
    file = write(tmp_path, sd1_weights())
    (tmp_path / "tokenizer" / "merges.txt").unlink()
    assert_refused(file, "has no tokenizer", "vocab.json and merges.txt beside it")


@pytest.mark.parametrize("family, parameters", [("sd1", 859_520_964), ("sd2", 865_910_724), ("sdxl", 2_567_463_684)])
def test_networks_of_the_shipped_configurations_have_the_published_numbers_of_parameters(
    family: str, parameters: int
) -> None:
    """The numbers of the UNet differ by family; the VAE is the same for all. parameters: the UNet's number."""
    from diffusers import AutoencoderKL, UNet2DConditionModel

    configs = json.loads(Path(models.__file__).with_name("checkpoint_configs.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        unet: Any = UNet2DConditionModel.from_config(configs[family]["unet/config.json"])
        vae: Any = AutoencoderKL.from_config(configs[family]["vae/config.json"])
    assert sum(weight.numel() for weight in unet.parameters()) == parameters
    assert sum(weight.numel() for weight in vae.parameters()) == 83_653_863
