"""Small data sets of random contents for public scripts, made with NumPy and Pillow; nothing is downloaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

_WORDS = (
    "the", "of", "and", "to", "in", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he",
)  # fmt: skip

_TOKENS_OF_A_DOCUMENT = 700


def make_data(folder: Path) -> Path:
    """Makes all data sets under a folder, unless they are there; returns the folder."""
    if (folder / "done").exists():
        return folder
    random = np.random.default_rng(0)
    (folder / "work").mkdir(parents=True, exist_ok=True)  # scripts look for ../data from here
    _mnist(folder / "data" / "MNIST" / "raw", random)
    _image_folder(folder / "images", random)
    _tokens(folder / "tokens", random)
    _words(folder / "wikitext-2", random)
    _chat(folder / "chat", random)
    _preferences(folder / "preferences", random)
    _detection(folder / "boxes", random)
    _coco(folder)
    _language_model(folder / "tiny-llama")
    (folder / "done").touch()
    return folder


def _mnist(folder: Path, random: np.random.Generator) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parents[2] / "mnist").mkdir(exist_ok=True)
    (folder.parents[2] / "mnist" / "MNIST").symlink_to(folder.parent)  # where others look for it
    for split, number in (("train", 6000), ("t10k", 1000)):
        images = random.integers(0, 256, (number, 28, 28), dtype=np.uint8)
        labels = (np.arange(number) % 10).astype(np.uint8)
        header = struct.pack(">iiii", 2051, number, 28, 28)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(
            struct.pack(">ii", 2049, number) + labels.tobytes()
        )


def _image_folder(folder: Path, random: np.random.Generator) -> None:
    from PIL import Image

    for split in ("train", "val", "validation"):
        for label in ("cat", "dog"):
            place = folder / split / label
            place.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(random.integers(0, 256, (256, 256, 3), dtype=np.uint8))
            for index in range(256 if split == "train" else 8):
                image.save(place / f"{index}.jpg", quality=60)


def _tokens(folder: Path, random: np.random.Generator) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        random.integers(0, 50304, 200_000, dtype=np.uint16).tofile(folder / f"{split}.bin")
        # Shards of modded-nanogpt: 256 numbers of header, then the tokens.
        shards = folder.parent / "modded" / "data" / "fineweb10B"
        shards.mkdir(parents=True, exist_ok=True)
        tokens = random.integers(0, 50256, 20_000_000 if split == "train" else 12_000_000, dtype=np.uint16)
        tokens[::_TOKENS_OF_A_DOCUMENT] = 50256  # the mark between two documents
        header = np.zeros(256, dtype=np.int32)
        header[:3] = 20240520, 1, len(tokens)
        with (shards / f"fineweb_{split}_000001.bin").open("wb") as file:
            file.write(header.tobytes())
            file.write(tokens.tobytes())


def _words(folder: Path, random: np.random.Generator) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, number in (("train", 4000), ("valid", 400), ("test", 400)):
        lines = (" ".join(random.choice(_WORDS, 20)) for _ in range(number))
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _chat(folder: Path, random: np.random.Generator) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, number in (("train", 512), ("test", 64)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(number):
                file.write(json.dumps({"text": " ".join(random.choice(_WORDS, 120))}) + "\n")


def _preferences(folder: Path, random: np.random.Generator) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, number in (("train", 512), ("test", 64)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(number):
                words = (" ".join(random.choice(_WORDS, 30)) for _ in range(3))
                file.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), words, strict=True))) + "\n")


def _detection(folder: Path, random: np.random.Generator) -> None:
    from PIL import Image

    for split, number in (("train", 64), ("val", 8)):
        images, labels = folder / "images" / split, folder / "labels" / split
        images.mkdir(parents=True, exist_ok=True)
        labels.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(random.integers(0, 256, (128, 128, 3), dtype=np.uint8))
        for index in range(number):
            picture.save(images / f"{index}.jpg")
            (labels / f"{index}.txt").write_text("0 0.5 0.5 0.4 0.4\n1 0.3 0.3 0.2 0.2\n", encoding="utf-8")
    (folder / "boxes.yaml").write_text(
        f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n  0: cat\n  1: dog\n",
        encoding="utf-8",
    )


def _coco(folder: Path) -> None:
    """Images of ``_detection`` once more, as COCO of 2017 names them."""
    for split in ("train", "val"):
        target = folder / f"{split}2017"
        target.mkdir(parents=True, exist_ok=True)
        images, boxes = [], []
        for index, picture in enumerate(sorted((folder / "boxes" / "images" / split).glob("*.jpg"))):
            (target / picture.name).write_bytes(picture.read_bytes())
            images.append({"id": index, "file_name": picture.name, "height": 128, "width": 128})
            corners = [30, 30, 90, 30, 90, 90, 30, 90]
            boxes.append(
                {"id": index + 1, "image_id": index, "category_id": 1, "bbox": [30, 30, 60, 60], "area": 3600,
                 "iscrowd": 0, "segmentation": [corners]}
            )  # fmt: skip
        document = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]}
        place = folder / "annotations" / f"instances_{split}2017.json"
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(document), encoding="utf-8")


def _language_model(folder: Path) -> None:
    """A tokenizer and random weights of a small Llama, as a hub would hold them."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    except ImportError:
        return
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", "<pad>"])
    tokenizer.train_from_iterator([" ".join(_WORDS)] * 50, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
