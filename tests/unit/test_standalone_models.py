"""Models that the demo loads from folders and files, and those that it refuses: damaged ones, and those that would run
code."""
from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file

pytest.importorskip("diffusers")

from tiny_model import tiny_sd15_pipeline, tiny_sdxl_pipeline

from lib_onediff.core.refusal import Refusal
from lib_onediff.demo.models import load_model
from lib_onediff.hosts.diffusers import model_files
from lib_onediff.hosts.diffusers import model_folder as model_folder_module

UNET_WEIGHTS = Path("unet", "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random model in diffusers' layout."""
    folder = tmp_path_factory.mktemp("models") / "small-model"
    tiny_sd15_pipeline(seed=3).save_pretrained(folder)
    return folder


@pytest.fixture
def damaged_folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of model_folder for a test to damage."""
    return Path(shutil.copytree(model_folder, tmp_path / "damaged-model"))


def assert_refused(model: Path, *parts: str) -> None:
    """Check that loading this model raises a Refusal: one line that ends with a full stop and contains `parts`."""
    with pytest.raises(Refusal) as caught:
        load_model(str(model))
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    for part in parts:
        assert part in sentence


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_control_characters_in_the_name_of_a_folder_are_replaced_in_the_name_of_the_model(
    model_folder: Path, tmp_path: Path
) -> None:
    """A line break, and the first character of an escape sequence for terminals, become question marks."""
    folder = shutil.copytree(model_folder, tmp_path / "a\x1b[31m\nb")
    assert load_model(str(folder)).name == "a?[31m?b"


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 4096, b'\x08\x00\x00\x00\x00\x00\x00\x00{"a":{}}'])
def test_a_corrupt_checkpoint_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.safetensors").write_bytes(content)
    assert_refused(tmp_path / "broken.safetensors", "broken.safetensors")


class Trap:
    """An object whose unpickling writes a file."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.witness,)


def test_a_pickled_checkpoint_is_refused_without_running_its_code(tmp_path: Path) -> None:
    file = tmp_path / "pickled.ckpt"
    witness = tmp_path / "witness"
    torch.save({"state_dict": Trap(witness)}, file)
    assert_refused(file, "pickled.ckpt")
    assert not witness.exists()


def test_a_folder_of_an_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    """The folder is that of a diffusion transformer, without unet/, vae/ and scheduler/."""
    (tmp_path / "transformer").mkdir()
    assert_refused(tmp_path, "not a Stable Diffusion 1.x, 2.x or XL model", "it has no unet/, vae/, scheduler/.")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    # Not load_file: Windows writes no file of which a part lies in memory.
    tensors = load((folder / UNET_WEIGHTS).read_bytes())
    change(tensors)
    save_file(tensors, folder / UNET_WEIGHTS)


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def write(*path: str, text: str) -> Callable[[Path], object]:
    return lambda folder: folder.joinpath(*path).write_text(text, encoding="utf-8")


def write_over_tokenizer(folder: Path) -> None:
    """Damage the tokenizer's files, which have other names with transformers 5."""
    for file in (folder / "tokenizer").iterdir():
        file.write_text("{", encoding="utf-8")


def write_over_words(model: dict[str, Any]) -> Callable[[Path], object]:
    """A function that replaces a model's tokenizer by one in a single file, whose vocabulary and merges are these."""

    def write_over(folder: Path) -> None:
        for file in (folder / "tokenizer").iterdir():
            file.unlink()
        (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps({"model": model}), encoding="utf-8")

    return write_over


SCHEDULER = ("scheduler", "scheduler_config.json")
CONFIG = ("text_encoder", "config.json")
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda folder: (folder / UNET_WEIGHTS).unlink(), "no .safetensors weights in the folder unet"),
    "no configuration": (lambda folder: (folder / "unet" / "config.json").unlink(), "config.json"),
    "a weight left out": (
        lambda folder: change_weights(folder, lambda weights: weights.pop("conv_in.weight")), "conv_in.weight",
    ),
    "another shape": (
        lambda folder: change_weights(folder, lambda weights: weights.update({"conv_in.weight": torch.zeros(1, 1, 1)})),
        "conv_in.weight",
    ),
    "a file cut off": (lambda folder: cut_off(folder / UNET_WEIGHTS), "diffusion_pytorch_model.safetensors"),
    "a broken tokenizer": (write_over_tokenizer, "in tokenizer cannot be read"),
    "a tokenizer without a vocabulary": (
        write_over_words({"merges": []}),
        "The tokenizer in tokenizer is damaged: its vocabulary is missing, is empty or has more than",
    ),
    "a tokenizer with an empty vocabulary": (
        write_over_words({"vocab": {}, "merges": []}), "its vocabulary is missing, is empty or has more than",
    ),
    "no tokenizer": (lambda folder: [file.unlink() for file in (folder / "tokenizer").iterdir()], "vocab.json"),
    "another class for a scheduler": (
        write(*SCHEDULER, text='{"_class_name": "UNet2DConditionModel"}'), "does not support the model's scheduler",
    ),
    "code for a scheduler": (
        write(*SCHEDULER, text='{"_class_name": ["os", "system"]}'), "does not support the model's scheduler",
    ),
    "no scheduler": (write(*SCHEDULER, text="{}"), "does not support the model's scheduler"),
    # Otherwise transformers would load the model that this file names.
    "an adapter": (
        write("text_encoder", "adapter_config.json", text='{"base_model_name_or_path": "/other"}'),
        "contains an adapter",
    ),
    **{f"{text[:8]} for a configuration": (write(*CONFIG, text=text), "config.json in text_encoder")
       for text in ("[" * 100_000, "\ufeff{}", '"text"', "null")},
}


@pytest.mark.parametrize(("damage", "part"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_refused_in_one_sentence(damaged_folder: Path, damage: Any, part: str) -> None:
    """damage: a function that damages the folder. part: what the sentence contains."""
    damage(damaged_folder)
    assert_refused(damaged_folder, part)


# --- files that would be run ------------------------------------------------------------------------------------------


PYTHON = """from pathlib import Path
Path({witness!r}).touch()
"""


PYTHON_FILES = (
    "own.py", "unet/own.py", "None.py", "vae/diffusers.py", "text_encoder/transformers.PY",
    "unet/diffusers/__init__.py", "scheduler/diffusers.pyc", f"vae/diffusers{EXTENSION_SUFFIXES[-1]}",
)


def write_python(folder: Path, file: str, witness: Path) -> None:
    """Write a Python file into a model folder. It creates the file `witness` if it is run."""
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(PYTHON.format(witness=str(witness)))


@pytest.mark.parametrize("file", PYTHON_FILES)
def test_a_folder_with_python_files_is_refused_and_none_is_run(damaged_folder: Path, tmp_path: Path, file: str) -> None:
    write_python(damaged_folder, file, tmp_path / "witness")
    assert_refused(damaged_folder, "contains Python code", "runs no code that comes with a model")
    assert not (tmp_path / "witness").exists()


def test_python_files_are_not_imported_even_without_the_check_for_them(
    damaged_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check only gives a reason: the loader itself imports nothing from a model's folder."""
    for file in PYTHON_FILES:
        write_python(damaged_folder, file, tmp_path / "witness")
    monkeypatch.setattr(model_folder_module, "check_files", lambda folder: None)
    assert load_model(str(damaged_folder)).name == "damaged-model"
    assert not (tmp_path / "witness").exists()


def test_pickled_weights_in_a_folder_are_never_unpickled(damaged_folder: Path, tmp_path: Path) -> None:
    """If there are safetensors weights beside them, these are loaded; otherwise the folder is refused."""
    witness = tmp_path / "witness"
    for name in ("diffusion_pytorch_model.bin", "pytorch_model.bin", "model.ckpt"):
        torch.save({"state_dict": Trap(witness)}, damaged_folder / "unet" / name)
    assert load_model(str(damaged_folder)).name == "damaged-model"
    (damaged_folder / UNET_WEIGHTS).unlink()
    assert_refused(damaged_folder, "no .safetensors weights in the folder unet")
    assert not witness.exists()


def test_sharded_weights_float16_variants_and_old_names_of_attention_layers_are_read(
    model_folder: Path, damaged_folder: Path
) -> None:
    """The UNet's weights are split into several files, as those of large models. The VAE's are in float16, with the
    names that old versions of diffusers gave to the layers of its attention. The loaded weights are those of the
    unchanged folder."""
    saved = load_model(str(model_folder)).pipeline
    vae = load_file(model_folder / "vae" / UNET_WEIGHTS.name)
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
def test_our_loader_makes_the_same_pipeline_as_from_pretrained_of_diffusers(build: Any, tmp_path: Path) -> None:
    """Each component has the same class, weights, buffers, tokens and configuration. build: makes the pipeline that is
    saved and loaded."""
    import diffusers

    build().save_pretrained(tmp_path / "model")
    kind = getattr(diffusers, type(build()).__name__)
    expected = kind.from_pretrained(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model")).pipeline
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
def test_a_damaged_or_hostile_model_index_is_ignored(damaged_folder: Path, index: str) -> None:
    """diffusers would import the classes that model_index.json names. Our loader chooses the pipeline by the other
    files in the folder."""
    (damaged_folder / "model_index.json").write_text(index)
    assert type(load_model(str(damaged_folder)).pipeline).__name__ == "StableDiffusionPipeline"


@pytest.mark.parametrize("linked", [UNET_WEIGHTS, Path("unet"), Path("unet", "config.json"), Path("notes")])
def test_a_folder_with_a_link_that_leads_out_of_it_is_refused(
    model_folder: Path, damaged_folder: Path, linked: Path, link: Callable[[Path, Path], None]
) -> None:
    """linked: what is replaced by a symbolic link to another model's file or folder; "notes" links to a folder of
    models."""
    place = damaged_folder / linked
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    link(place, model_folder / linked if (model_folder / linked).exists() else model_folder.parent)
    assert_refused(damaged_folder, "link", linked.parts[0])


def test_a_folder_of_a_hugging_face_cache_is_loaded(
    damaged_folder: Path, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    """The folder's files are symbolic links to blobs of the same model in the cache, which are followed. A link to
    another place is refused there too."""
    cache = tmp_path / "models--one--model"
    (cache / "blobs").mkdir(parents=True)
    snapshot = Path(shutil.copytree(damaged_folder, cache / "snapshots" / "abc"))
    for number, file in enumerate(sorted(file for file in snapshot.rglob("*") if file.is_file())):
        blob = file.rename(cache / "blobs" / str(number))
        link(file, blob)
    assert load_model(str(snapshot)).name == "abc"
    link(snapshot / "unet" / "more", damaged_folder / "unet")
    assert_refused(snapshot, "link")


# --- files that would be unpickled ------------------------------------------------------------------------------------


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions by which anything was unpickled: torch.load, pickle.load, pickle.loads."""
    loaded: list[str] = []

    def spied(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def load(*given: Any, **options: Any) -> Any:
            loaded.append(name)
            return real(*given, **options)

        return load

    monkeypatch.setattr(torch, "load", spied("torch.load", torch.load))
    for name in ("load", "loads"):
        monkeypatch.setattr(pickle, name, spied(f"pickle.{name}", getattr(pickle, name)))
    return loaded


PARTS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}


def index_weights(folder: Path, part: str, named: Any, ending: str = ".safetensors.index.json") -> Path:
    """Rename the weights of a component (part), and write an index of sharded weights that names another file for them.
    Returns the renamed file."""
    whole = folder / part / f"{PARTS[part]}.safetensors"
    names = list(load(whole.read_bytes()))
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, named)}
    (folder / part / f"{PARTS[part]}{ending}").write_text(json.dumps(index), encoding="utf-8")
    return whole.rename(whole.with_name("decoy.safetensors"))


OTHER_NAMES = (
    "weights.bin", "../weights.bin", "./decoy.safetensors", "../unet/decoy.safetensors", "DECOY.safetensors",
    "decoy.SAFETENSORS", "decoy.safetensors ", "decoy.safetensors\u0000", "decoy\uff0esafetensors",
    "C:decoy.safetensors", "..\\weights.bin", "sub/decoy.safetensors", "folder.safetensors", "{absolute}", "", None, 5,
    ["decoy.safetensors"],
)


@pytest.mark.parametrize("named", OTHER_NAMES, ids=repr)
def test_an_index_may_name_only_safetensors_files_of_its_own_folder(tmp_path: Path, named: Any) -> None:
    """An index lists the files of sharded weights. named: a value that is no such file, and for which another file
    might be read or unpickled."""
    part = tmp_path / "unet"
    (part / "folder.safetensors").mkdir(parents=True)
    (part / "sub").mkdir()
    for file in ("decoy.safetensors", "weights.bin", "../weights.bin", "sub/decoy.safetensors"):
        (part / file).touch()
    name = str(part / "decoy.safetensors") if named == "{absolute}" else named
    index = {"weight_map": {"first": "decoy.safetensors", "last": name}}
    (part / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(Refusal, match="index.json in unet names .*, which is not a .safetensors file in that folder"):
        model_files.weight_files(part)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("named", ["weights.bin", "../weights.bin"])
def test_an_index_that_names_a_pickle_is_refused_before_anything_is_unpickled(
    damaged_folder: Path, part: str, named: str, unpickled: list[str]
) -> None:
    """The index is that of sharded weights. part: the component whose weights it lists. named: the pickle, in the
    component's folder or above it."""
    weights = index_weights(damaged_folder, part, named)
    torch.save(load(weights.read_bytes()), damaged_folder / part / named)
    assert_refused(damaged_folder, f"in {part} names {named!r}")
    assert unpickled == []


@pytest.mark.parametrize("ending", [
    ".safetensors.index.fp16.json", ".fp16.safetensors.index.json", ".SAFETENSORS.INDEX.JSON", ".bin.index.json",
])
def test_an_index_is_checked_under_every_name_that_a_library_would_read(
    damaged_folder: Path, ending: str, unpickled: list[str]
) -> None:
    """Each ending is one under which diffusers or transformers may look for an index of sharded weights. The index
    names a pickle."""
    index_weights(damaged_folder, "unet", "weights.bin", ending)
    assert_refused(damaged_folder, "names 'weights.bin'")
    assert unpickled == []


@pytest.mark.parametrize("index", [
    '{"weight_map": []}', '{"weight_map": {}}', "{}", '{"weight_map": {"a": "b"}, "metadata": 5}', "[" * 100_000,
    json.dumps({"weight_map": dict.fromkeys(map(str, range(20_001)), "diffusion_pytorch_model.safetensors")}),
    '{"weight_map": ' + " " * (33 << 20) + "{}}",
], ids=lambda text: text[:40].strip())
def test_a_damaged_or_too_large_index_of_sharded_weights_is_refused(damaged_folder: Path, index: str) -> None:
    (damaged_folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(index)
    assert_refused(damaged_folder, "diffusion_pytorch_model.safetensors.index.json in unet")


def test_a_pickle_beside_safetensors_weights_is_not_unpickled(damaged_folder: Path, unpickled: list[str]) -> None:
    torch.save(load((damaged_folder / UNET_WEIGHTS).read_bytes()), damaged_folder / "unet" / "pytorch_model.bin")
    assert load_model(str(damaged_folder)).name == "damaged-model"
    assert unpickled == []


@pytest.mark.parametrize("name", [
    "Adapter_Config.json", "ADAPTER_CONFIG.JSON", "adapter_config.json.", "adapter_config.j\u017fon",
    "\uff41dapter_config.json",
])
def test_an_adapter_is_refused_under_any_spelling_of_its_file_name(damaged_folder: Path, name: str) -> None:
    """adapter_config.json may name another model. On file systems where these spellings are the same name, transformers
    would load that model."""
    (damaged_folder / "text_encoder" / name).write_text('{"base_model_name_or_path": "/other"}')
    assert_refused(damaged_folder, "contains an adapter")


def change_json(*path: str, **changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder.joinpath(*path)
        file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")

    return change


UNET_CONFIG = ("unet", "config.json")
VAE_CONFIG = ("vae", "config.json")
NUMBERS: dict[str, Callable[[Path], object]] = {
    "no sample_size": change_json(*UNET_CONFIG, sample_size=None),
    "a text for a sample_size": change_json(*UNET_CONFIG, sample_size="64"),
    "a negative sample_size": change_json(*UNET_CONFIG, sample_size=-1),
    "a huge sample_size": change_json(*UNET_CONFIG, sample_size=10**30),
    "10^7 layers": change_json(*UNET_CONFIG, layers_per_block=10**7),
    "10^7 layers of a transformer": change_json(*UNET_CONFIG, transformer_layers_per_block=[1, 10**7, 1, 1]),
    "10^7 layers of a text encoder": change_json(*CONFIG, num_hidden_layers=10**7),
    "-5 layers": change_json(*CONFIG, num_hidden_layers=-5),
    "lists in lists": change_json(*UNET_CONFIG, transformer_layers_per_block=json.loads("[" * 700 + "]" * 700)),
    "10^5 layers of a VAE": change_json(*VAE_CONFIG, layers_per_block=10**5),
    "10^6 blocks": change_json(*VAE_CONFIG, down_block_types=["DownEncoderBlock2D"] * 10**6),
    "10^6 channels": change_json(*UNET_CONFIG, block_out_channels=[10**6] * 4),
    "10^12 words": change_json(*CONFIG, vocab_size=10**12),
    "a text for a factor": change_json(*VAE_CONFIG, scaling_factor="0.18"),
    "no number for a factor": change_json(*VAE_CONFIG, scaling_factor=float("nan")),
    "quantized": change_json(*UNET_CONFIG, quantization_config={"quant_method": "bitsandbytes"}),
    "10^12 steps": change_json(*SCHEDULER, num_train_timesteps=10**12),
    "a text for steps": change_json(*SCHEDULER, num_train_timesteps="1000"),
    "a text for a beta": change_json(*SCHEDULER, beta_start="x"),
}


@pytest.mark.parametrize("change", NUMBERS.values(), ids=NUMBERS)
def test_a_configuration_with_impossible_values_is_refused_quickly(
    damaged_folder: Path, change: Callable[[Path], object], request: pytest.FixtureRequest
) -> None:
    """It is refused before a network of that size is made, which would take hours or all memory. change: writes the
    value into a configuration."""
    began = time.process_time()
    change(damaged_folder)
    is_size = request.node.callspec.id.startswith("10^") and "steps" not in request.node.callspec.id
    assert_refused(damaged_folder, *["a much larger network than there are weights for"] * is_size)
    assert time.process_time() - began < 10


@pytest.mark.parametrize("change", [
    change_json(*UNET_CONFIG, _class_name="own.Class", auto_map={"AutoModel": "own.Class"}),
    change_json(*CONFIG, auto_map={"AutoModel": "own.Class"}, transformers_weights="../weights.bin", num_labels=10**9),
    change_json("tokenizer", "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Class", None]},
                tokenizer_class="Own", vocab_file="/etc/hostname", chat_template="{{ 1 }}", init_inputs=["x"],
                fast_tokenizer_files=["tokenizer.5.0.json"]),
], ids=["unet", "text_encoder", "tokenizer"])
def test_classes_and_files_that_a_configuration_names_are_ignored(
    model_folder: Path, damaged_folder: Path, change: Callable[[Path], object]
) -> None:
    """The loaded weights and tokens are those of the unchanged folder. change: writes the names into the configuration
    of a component."""
    change(damaged_folder)
    expected, loaded = (load_model(str(folder)).pipeline for folder in (model_folder, damaged_folder))
    assert same_weights(loaded.text_encoder, expected.text_encoder.state_dict())
    assert same_weights(loaded.unet, expected.unet.state_dict())
    assert loaded.tokenizer("An owl").input_ids == expected.tokenizer("An owl").input_ids


# --- tokenizers -------------------------------------------------------------------------------------------------------


def rewrite_tokenizer(folder: Path, words: Any, merges: Any, config: Any = None) -> None:
    """Replace the tokenizer's files by these words with their numbers, merges, and perhaps a configuration."""
    for file in (folder / "tokenizer").iterdir():
        file.unlink()
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps(words))
    (folder / "tokenizer" / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    if config is not None:
        (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))


WORDS = {"a": 0, "b": 1, "ab": 2, "<|startoftext|>": 3, "<|endoftext|>": 4}
TOKENIZERS: dict[str, tuple[Any, ...]] = {
    "no words": ({}, []), "a number twice": ({**WORDS, "c": 0}, []), "a negative number": ({**WORDS, "c": -1}, []),
    "a large number": ({**WORDS, "c": 2**31}, []), "no number": ({**WORDS, "c": "5"}, []),
    "a merge of an unknown word": (WORDS, ["a c"]), "a merge into an unknown word": (WORDS, ["b a"]),
    "a merge of three words": (WORDS, ["a b a"]),
    "a long word": ({**WORDS, "c" * 10_000: 5}, []),
    "an added token without letters": (WORDS, [], {"added_tokens_decoder": {"5": {"content": ""}}}),
    "an added token with a huge number": (WORDS, [], {"added_tokens_decoder": {"9999999999": {"content": "x"}}}),
    "a number as the padding token": (WORDS, [], {"pad_token": 5}),
}


@pytest.mark.parametrize("given", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer_with_a_damaged_vocabulary_or_configuration_is_refused(
    damaged_folder: Path, given: tuple[Any, ...]
) -> None:
    """given: the words with their numbers, the merges, and perhaps a configuration."""
    rewrite_tokenizer(damaged_folder, *given)
    assert_refused(damaged_folder, " in tokenizer")


def test_only_the_words_and_merges_of_a_tokenizer_file_are_used(damaged_folder: Path, model_folder: Path) -> None:
    """The values that are changed in tokenizer.json make the tokenizer's Rust library panic if it reads them, and some
    end the process. The tokens are those of the unchanged folder."""
    file = damaged_folder / "tokenizer" / "tokenizer.json"
    if not file.exists():
        pytest.skip("transformers 4 writes none")
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["continuing_subword_prefix"] = "#" * 100
    content["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}
    file.write_text(json.dumps(content), encoding="utf-8")
    expected, loaded = (load_model(str(folder)).pipeline.tokenizer for folder in (model_folder, damaged_folder))
    assert loaded("An owl, 2 rockets!").input_ids == expected("An owl, 2 rockets!").input_ids


class Panic(BaseException):
    """The exception that a panic of a Rust library raises in Python."""


def test_a_model_whose_tokenizer_makes_the_rust_library_panic_is_refused_in_one_sentence(
    damaged_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Python, a panic of a Rust library is a BaseException and no Exception, so that `except Exception` does not
    catch it."""
    import transformers

    def panic(*given: Any, **options: Any) -> None:
        raise Panic("index out of bounds\nthe len is 0")

    monkeypatch.setattr(transformers.CLIPTokenizer, "from_pretrained", panic)
    assert_refused(damaged_folder, "tokenizer", "index out of bounds")


# --- paths that are no model ------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("place", [
    "unet/config.json", "unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors.index.json",
    "tokenizer/vocab.json", "notes.txt", "scheduler/scheduler_config.json",
])
def test_a_named_pipe_in_a_model_folder_is_refused_unopened(damaged_folder: Path, place: str) -> None:
    """Opening a named pipe (mkfifo) would wait for ever for another process to write into it. place: the pipe's path in
    the folder."""
    (damaged_folder / place).unlink(missing_ok=True)
    os.mkfifo(damaged_folder / place)
    assert_refused(damaged_folder, "neither a file nor a folder")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("name", ["model.safetensors", "model.ckpt", "model"])
def test_a_named_pipe_in_place_of_a_checkpoint_is_refused_unopened(tmp_path: Path, name: str) -> None:
    """Opening a named pipe (mkfifo) would wait for ever for another process to write into it."""
    os.mkfifo(tmp_path / name)
    assert_refused(tmp_path / name, name)


@pytest.mark.parametrize("path", ["a" * 5000, "a/" * 3000, "no\0such", "~nobody-of-this-name/model", "\n" * 5000, ""])
def test_an_impossible_path_is_refused_in_one_short_line(path: str) -> None:
    with pytest.raises(Refusal) as caught:
        load_model(path)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 99_000_000, 33 << 20])
def test_an_incomplete_safetensors_file_is_refused_whatever_length_it_claims_for_its_header(
    tmp_path: Path, length: int
) -> None:
    """length: the length of the header in bytes, as it is in the first 8 bytes of the file. The file has 100 MB, mostly
    zeros."""
    file = tmp_path / "model.safetensors"
    with file.open("wb") as opened:
        opened.write(length.to_bytes(8, "little") + b"{" * 100)
        opened.truncate(100_000_000)
    assert_refused(file, "not a complete .safetensors file")


def test_a_file_is_refused_unless_its_name_ends_in_lowercase_safetensors(tmp_path: Path, unpickled: list[str]) -> None:
    """Libraries choose the format by the file's name. They would unpickle the files that are refused here, whatever
    their content is."""
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    for name in ("model.ckpt", "model.SAFETENSORS", "model.pt", "model.safetensors.bin", "model"):
        shutil.copy(tmp_path / "model.safetensors", tmp_path / name)
        if (tmp_path / name).name in os.listdir(tmp_path):
            assert_refused(tmp_path / name, "is not a .safetensors file")
    assert unpickled == []


def test_a_folder_with_too_many_files_or_without_a_unet_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit, MOST_FILES, is 20 files here."""
    monkeypatch.setattr(model_files, "MOST_FILES", 20)
    for part in ("unet", "vae", "scheduler"):
        (tmp_path / part).mkdir()
    for number in range(21):
        (tmp_path / "vae" / str(number)).touch()
    assert_refused(tmp_path, "more than 20 files")
    shutil.rmtree(tmp_path / "unet")
    assert_refused(tmp_path, "it has no unet/")
