"""The standalone host's models: the small random ones, and what cannot be loaded."""
from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers")

from tiny_model import tiny_sd15_pipeline
from tiny_sdxl import tiny_sdxl_pipeline

from lib_onediff.demo import model_folder as model_folder_module
from lib_onediff.demo.errors import Refusal
from lib_onediff.demo.models import load_model

UNET_WEIGHTS = Path("unet", "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model in diffusers' layout."""
    folder = tmp_path_factory.mktemp("models") / "small-model"
    tiny_sd15_pipeline(seed=3).save_pretrained(folder)
    return folder


@pytest.fixture
def damaged_folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(model_folder, tmp_path / "damaged-model"))


def assert_refused(model: Path, *parts: str) -> None:
    with pytest.raises(Refusal) as caught:
        load_model(str(model))
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    for part in parts:
        assert part in sentence


@pytest.mark.parametrize("build", [tiny_sd15_pipeline, tiny_sdxl_pipeline])
def test_same_seed_gives_the_same_weights(build: Any) -> None:
    first, again, other = (build(seed).unet.state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_building_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    tiny_sd15_pipeline()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("build", [tiny_sd15_pipeline, tiny_sdxl_pipeline])
def test_tiny_models_make_pictures(build: Any) -> None:
    """Neither grey nor clipped, and each prompt its own."""
    pipeline = build()
    pipeline.set_progress_bar_config(disable=True)
    pictures = [
        pipeline(
            prompt, width=64, height=64, num_inference_steps=4, output_type="np",
            generator=torch.Generator().manual_seed(1),
        ).images[0]
        for prompt in ("a fox", "a castle")
    ]
    for picture in pictures:
        assert picture.std() > 0.05
        assert ((picture > 0.01) & (picture < 0.99)).mean() > 0.8
    assert abs(pictures[0] - pictures[1]).mean() > 0.02


def test_tiny_vae_carries_colour() -> None:
    """An image comes back from its latents closer to its own colour than to any other."""
    vae = tiny_sd15_pipeline().vae
    colours = torch.tensor([[0.6, -0.6, -0.6], [-0.6, 0.6, -0.6], [-0.6, -0.6, 0.6], [0.6, 0.6, 0.6], [0.0, 0.0, 0.0]])
    images = colours[:, :, None, None].expand(-1, -1, 64, 64)
    with torch.no_grad():
        returned = vae.decode(vae.encode(images).latent_dist.mean).sample.mean((2, 3))
    assert torch.cdist(returned, colours).argmin(1).tolist() == list(range(len(colours)))


def test_every_layer_of_the_tiny_unet_matters() -> None:
    """A mistake in any layer must change the output: no weight matrix may be without effect."""
    unet = tiny_sd15_pipeline().unet
    latent, context = torch.randn(1, 4, 16, 16), torch.randn(1, 77, 64)

    def output() -> torch.Tensor:
        with torch.no_grad():
            return unet(latent, 500, context).sample

    whole = output()
    matrices = [(name, weight) for name, weight in unet.named_parameters() if weight.ndim > 1]
    for name, weight in matrices[::7]:
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(0.5)
            assert (output() - whole).abs().max() > 1e-5, name
            weight.copy_(kept)


def test_the_shipped_model_is_the_default() -> None:
    model = load_model(None)
    assert model.name == "emoji-sd" and model.side == 256 and "emoji" in model.about and "--model" in model.about


def test_random_weights_are_the_same_in_every_run() -> None:
    first, again = load_model(None, random=True), load_model(None, random=True)
    assert first.name == "random" and first.about.startswith("Random weights")
    assert same_weights(first.unet, again.unet.state_dict())
    assert not torch.equal(first.unet.conv_in.weight, load_model(None).unet.conv_in.weight)


def test_folder_is_loaded_as_it_was_saved(model_folder: Path) -> None:
    model = load_model(str(model_folder))
    assert model.name == "small-model"
    saved = tiny_sd15_pipeline(seed=3).unet.state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.unet.state_dict().items())


def test_a_models_name_is_one_line_that_no_console_obeys(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "a\x1b[31m\nb")
    assert load_model(str(folder)).name == "a?[31m?b"


def test_sdxl_folder(tmp_path: Path) -> None:
    tiny_sdxl_pipeline().save_pretrained(tmp_path / "xl")
    pipeline = load_model(str(tmp_path / "xl")).pipeline
    assert type(pipeline).__name__ == "StableDiffusionXLPipeline" and pipeline.config.force_zeros_for_empty_prompt


def test_refiner_folder(tmp_path: Path) -> None:
    tiny_sdxl_pipeline().save_pretrained(tmp_path / "refiner")
    for part in ("text_encoder", "tokenizer"):
        shutil.rmtree(tmp_path / "refiner" / part)
    pipeline = load_model(str(tmp_path / "refiner")).pipeline
    assert pipeline.text_encoder is None and pipeline.config.requires_aesthetics_score


def test_model_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nothing.safetensors", "nothing.safetensors")


def test_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    assert_refused(file, "notes.txt", ".safetensors file")


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 4096, b'\x08\x00\x00\x00\x00\x00\x00\x00{"a":{}}'])
def test_corrupt_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.safetensors").write_bytes(content)
    assert_refused(tmp_path / "broken.safetensors", "broken.safetensors")


def test_checkpoint_of_another_architecture(tmp_path: Path) -> None:
    save_file({"double_blocks.0.img_attn.qkv.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    assert_refused(tmp_path / "other.safetensors", "no UNet and no VAE and no text encoder")


class Trap:
    """An object whose unpickling writes a file."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.witness,)


def test_checkpoint_that_runs_code_is_not_loaded(tmp_path: Path) -> None:
    file, witness = tmp_path / "pickled.ckpt", tmp_path / "witness"
    torch.save({"state_dict": Trap(witness)}, file)
    assert_refused(file, "pickled.ckpt")
    assert not witness.exists()


def test_folder_of_another_architecture(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    assert_refused(tmp_path, "no folder of Stable Diffusion 1.x, 2.x or XL", "it has no unet/, vae/, scheduler/.")


@pytest.mark.parametrize("file", [UNET_WEIGHTS, Path("unet", "config.json"), Path("text_encoder", "config.json")])
def test_folder_with_a_missing_file(damaged_folder: Path, file: Path) -> None:
    (damaged_folder / file).unlink()
    assert_refused(damaged_folder, file.name if file.suffix == ".json" else "no weights of the unet")


def test_folder_with_a_weight_left_out(damaged_folder: Path) -> None:
    tensors = load_file(damaged_folder / UNET_WEIGHTS)
    del tensors["conv_in.weight"]
    save_file(tensors, damaged_folder / UNET_WEIGHTS)
    assert_refused(damaged_folder, "conv_in.weight")


def test_folder_with_a_cut_off_file(damaged_folder: Path) -> None:
    weights = damaged_folder / UNET_WEIGHTS
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert_refused(damaged_folder, "diffusion_pytorch_model.safetensors")


def test_folder_with_weights_of_another_shape(damaged_folder: Path) -> None:
    tensors = load_file(damaged_folder / UNET_WEIGHTS)
    save_file({**tensors, "conv_in.weight": torch.zeros(1, 1, 1, 1)}, damaged_folder / UNET_WEIGHTS)
    assert_refused(damaged_folder, "damaged-model", "conv_in.weight")


def test_folder_with_a_broken_tokenizer(damaged_folder: Path) -> None:
    (damaged_folder / "tokenizer" / "vocab.json").write_text("{")
    assert_refused(damaged_folder, "damaged-model")


# --- what a folder may name -------------------------------------------------------------------------------------------


PYTHON = """from pathlib import Path
Path({witness!r}).touch()
"""


PYTHON_FILES = (
    "own.py", "unet/own.py", "None.py", "vae/diffusers.py", "text_encoder/transformers.PY",
    "unet/diffusers/__init__.py", "scheduler/diffusers.pyc", "vae/diffusers.so",
)


def bring_python(folder: Path, file: str, witness: Path) -> None:
    """A file of Python in a model folder, and what exists once that file has run."""
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(PYTHON.format(witness=str(witness)))


@pytest.mark.parametrize("file", PYTHON_FILES)
def test_folder_that_brings_python_is_not_loaded(damaged_folder: Path, tmp_path: Path, file: str) -> None:
    bring_python(damaged_folder, file, tmp_path / "witness")
    assert_refused(damaged_folder, "brings Python code", "runs nothing that comes with a model")
    assert not (tmp_path / "witness").exists()


def test_nothing_imports_python_that_comes_after_the_check(
    damaged_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is not what keeps the code from running: nothing looks for it."""
    for file in PYTHON_FILES:
        bring_python(damaged_folder, file, tmp_path / "witness")
    monkeypatch.setattr(model_folder_module, "check_files", lambda folder: None)
    assert load_model(str(damaged_folder)).name == "damaged-model"
    assert not (tmp_path / "witness").exists()


def test_pickled_weights_in_a_folder_are_not_opened(damaged_folder: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    for name in ("diffusion_pytorch_model.bin", "pytorch_model.bin", "model.ckpt"):
        torch.save({"state_dict": Trap(witness)}, damaged_folder / "unet" / name)
    assert load_model(str(damaged_folder)).name == "damaged-model"
    (damaged_folder / UNET_WEIGHTS).unlink()
    assert_refused(damaged_folder, "no weights of the unet as .safetensors")
    assert not witness.exists()


def test_weights_in_parts_and_in_float16_are_read(damaged_folder: Path) -> None:
    """As large models and variants have them; an old VAE's attention has other names."""
    saved = load_model(str(damaged_folder)).pipeline
    vae = load_file(damaged_folder / "vae" / UNET_WEIGHTS.name)
    (damaged_folder / UNET_WEIGHTS).unlink()
    saved.unet.save_pretrained(damaged_folder / "unet", max_shard_size="500KB")
    assert len(list((damaged_folder / "unet").glob("*.safetensors"))) > 1
    (damaged_folder / "vae" / UNET_WEIGHTS.name).unlink()
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {re.sub("to_q|to_k|to_v|to_out.0", lambda found: older[found[0]], name): weight.half()
               for name, weight in vae.items()}
    assert set(renamed) != set(vae)
    save_file(renamed, damaged_folder / "vae" / "diffusion_pytorch_model.fp16.safetensors")
    loaded = load_model(str(damaged_folder)).pipeline
    assert same_weights(loaded.unet, saved.unet.state_dict())
    assert same_weights(loaded.vae, {name: weight.half().float() for name, weight in saved.vae.state_dict().items()})


def same_weights(network: Any, expected: dict[str, torch.Tensor]) -> bool:
    found = network.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("build", [tiny_sd15_pipeline, tiny_sdxl_pipeline])
def test_our_loader_reads_what_diffusers_own_does(build: Any, tmp_path: Path) -> None:
    import diffusers

    build().save_pretrained(tmp_path / "model")
    kind = getattr(diffusers, type(build()).__name__)
    expected, loaded = kind.from_pretrained(tmp_path / "model"), load_model(str(tmp_path / "model")).pipeline
    for name, part in expected.components.items():
        ours = loaded.components[name]
        assert type(ours) is type(part), name
        if isinstance(part, torch.nn.Module):
            assert same_weights(ours, part.state_dict()) and not ours.training, name
            assert {name: buffer.tolist() for name, buffer in ours.named_buffers()} == {
                name: buffer.tolist() for name, buffer in part.named_buffers()}
        elif hasattr(part, "bos_token_id"):
            text = "An owl, 2 rockets!"
            options = {"padding": "max_length", "max_length": part.model_max_length, "truncation": True}
            assert ours(text, **options).input_ids == part(text, **options).input_ids
            assert ours.model_max_length == part.model_max_length
        elif part is not None:
            assert dict(ours.config) == {**part.config, "_class_name": type(ours).__name__}


@pytest.mark.parametrize("index", [
    '{"unet": ["os", "system"], "_class_name": "own"}', '{"scheduler": ["subprocess", "Popen"]}', "[" * 100_000, "NaN",
])
def test_an_index_has_no_say(damaged_folder: Path, index: str) -> None:
    (damaged_folder / "model_index.json").write_text(index)
    assert type(load_model(str(damaged_folder)).pipeline).__name__ == "StableDiffusionPipeline"


@pytest.mark.parametrize("scheduler", [
    {"_class_name": "UNet2DConditionModel"}, {"_class_name": ["os", "system"]}, {}, {"_class_name": "\x1b[31m\n"},
])
def test_folder_with_an_odd_scheduler_is_refused(damaged_folder: Path, scheduler: dict[str, Any]) -> None:
    (damaged_folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    assert_refused(damaged_folder, "does not know the scheduler")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "\ufeff{}", '"text"', "null", "5", "NaN"])
def test_configuration_that_is_no_mapping_is_refused_in_one_sentence(damaged_folder: Path, content: str) -> None:
    (damaged_folder / "text_encoder" / "config.json").write_text(content, encoding="utf-8")
    assert_refused(damaged_folder, "config.json in text_encoder")


def test_folder_with_an_adapter_is_refused(damaged_folder: Path) -> None:
    """transformers would load the model that it names."""
    (damaged_folder / "text_encoder" / "adapter_config.json").write_text('{"base_model_name_or_path": "/other"}')
    assert_refused(damaged_folder, "brings an adapter")


@pytest.mark.parametrize("linked", [UNET_WEIGHTS, Path("unet"), Path("unet", "config.json"), Path("notes")])
def test_folder_with_a_link_that_leaves_it_is_refused(model_folder: Path, damaged_folder: Path, linked: Path) -> None:
    place = damaged_folder / linked
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(model_folder / linked if (model_folder / linked).exists() else "/etc")
    assert_refused(damaged_folder, "link", linked.parts[0])


def test_folder_with_links_inside_is_loaded(damaged_folder: Path) -> None:
    weights = damaged_folder / UNET_WEIGHTS
    weights.rename(damaged_folder / "weights")
    weights.symlink_to(Path("..", "weights"))
    assert load_model(str(damaged_folder)).name == "damaged-model"


def test_folder_of_a_hugging_face_cache_is_loaded(damaged_folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--one--model"
    (cache / "blobs").mkdir(parents=True)
    snapshot = Path(shutil.copytree(damaged_folder, cache / "snapshots" / "abc"))
    for number, file in enumerate(sorted(file for file in snapshot.rglob("*") if file.is_file())):
        blob = file.rename(cache / "blobs" / str(number))
        file.symlink_to(blob)
    assert load_model(str(snapshot)).name == "abc"
    (snapshot / "unet" / "more").symlink_to(damaged_folder / "unet")
    assert_refused(snapshot, "link")
