"""The text that ``pico`` learned: Python files of the standard library and of permissive packages.

A package counts if its own metadata states a licence of ``PERMISSIVE`` and no other; a file counts
if it is Python source of ordinary shape, once. One file in ``HELD_OUT_OF`` is held out, chosen by
the hash of its name, and is never trained on. ``corpus.json`` records every package with version,
licence and the sha256 of its text, so that anyone can see what went in and build it again.
"""

import argparse
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["Package", "Source", "gather", "permissive_licence", "train_tokenizer", "write_corpus"]

HELD_OUT_OF = 50
SPECIALS = ["<|endoftext|>", "<|mask|>"]
PERMISSIVE = {
    "0bsd",
    "apache-2.0",
    "bsd-2-clause",
    "bsd-3-clause",
    "cc0-1.0",
    "hpnd",
    "isc",
    "mit",
    "mit-cmu",
    "psf-2.0",
    "python-2.0",
    "unlicense",
    "zlib",
}
# Free-text licences, as packages write them, that mean one of the above.
SPELLINGS = {
    "apache": "apache-2.0",
    "apache 2": "apache-2.0",
    "apache 2.0": "apache-2.0",
    "apache-2.0 license": "apache-2.0",
    "apache license 2.0": "apache-2.0",
    "apache license v2.0": "apache-2.0",
    "apache license, version 2.0": "apache-2.0",
    "apache license version 2.0": "apache-2.0",
    "apache software license": "apache-2.0",
    "bsd": "bsd-3-clause",
    "bsd license": "bsd-3-clause",
    "bsd 2-clause": "bsd-2-clause",
    "bsd 3-clause": "bsd-3-clause",
    "bsd 3-clause license": "bsd-3-clause",
    "3-clause bsd license": "bsd-3-clause",
    "bsd-3": "bsd-3-clause",
    "bsd-3-clause license": "bsd-3-clause",
    "new bsd": "bsd-3-clause",
    "new bsd license": "bsd-3-clause",
    "modified bsd license": "bsd-3-clause",
    "isc license": "isc",
    "isc license (iscl)": "isc",
    "mit license": "mit",
    "historical permission notice and disclaimer (hpnd)": "hpnd",
    "psf": "psf-2.0",
    "psf license": "psf-2.0",
    "psfl": "psf-2.0",
    "python software foundation license": "psf-2.0",
    "the unlicense (unlicense)": "unlicense",
}
# Digits stand alone; a word takes one sign or space before it; line ends stand alone.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n|[^\S\n]+(?!\S)|\s+"


@dataclass(frozen=True)
class Source:
    """One file: its package's place among the packages, its name and its text."""

    package: str
    path: str
    text: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(f"{self.package}/{self.path}".encode()).hexdigest()
        return int(digest[:8], 16) % HELD_OUT_OF == 0


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    licence: str
    files: int
    bytes: int
    sha256: str


def permissive_licence(expression: str, classifiers: list[str], text: str) -> str | None:
    """The licence, lower case, if every stated one is permissive; None if one is not or none is.

    The SPDX expression counts first, then the classifiers, then a short free text.
    """
    if expression:
        alternatives = re.split(r"\s+OR\s+", expression.strip("() "), flags=re.I)
        for alternative in alternatives:
            parts = [
                p.strip("() ").lower() for p in re.split(r"\s+AND\s+", alternative, flags=re.I)
            ]
            if all(p in PERMISSIVE for p in parts):
                return " and ".join(parts)
        return None
    stated = [c.split("::")[-1].strip() for c in classifiers if c.startswith("License ::")]
    stated = [s for s in stated if s != "OSI Approved"]
    if not stated and text and len(text) < 60:
        stated = [text.strip()]
    names = {SPELLINGS.get(s.lower(), s.lower()) for s in stated}
    return " and ".join(sorted(names)) if names and names <= PERMISSIVE else None


def _of_distribution(dist: Distribution) -> tuple[str, str, str, list[tuple[str, Path]]] | None:
    meta: Any = dist.metadata
    licence = permissive_licence(
        meta.get("License-Expression") or "",
        meta.get_all("Classifier") or [],
        meta.get("License") or "",
    )
    if licence is None:
        return None
    files = [(str(f), Path(str(f.locate()))) for f in dist.files or [] if f.suffix == ".py"]
    return meta["Name"], dist.version, licence, sorted(files)


def _standard_library() -> tuple[str, str, str, list[tuple[str, Path]]]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        (str(path.relative_to(root)), path)
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)
    ]
    return "cpython", sys.version.split()[0], "psf-2.0", sorted(files)


def licence_texts(names: set[str]) -> dict[str, str]:
    """The licence files that the named packages ship, for whoever passes their text on."""
    texts = {}
    for dist in distributions():
        if dist.metadata["Name"] not in names:
            continue
        parts = [
            Path(str(f.locate())).read_text(encoding="utf-8", errors="replace")
            for f in dist.files or []
            if ".dist-info" in str(f) and re.match(r"(?i)(licen[cs]e|copying|notice)", f.name)
        ]
        texts[dist.metadata["Name"]] = "\n\n".join(dict.fromkeys(parts))
    standard = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    if "cpython" in names:
        texts["cpython"] = standard.read_text(encoding="utf-8") if standard.exists() else ""
    return texts


def _read(path: Path) -> str | None:
    """The file's text if it looks like source that people wrote."""
    try:
        text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None
    if not 200 <= len(text) <= 400_000:
        return None
    lines = text.split("\n")
    letters = sum(map(str.isalpha, text[:20_000])) / len(text[:20_000])
    ordinary = max(map(len, lines)) <= 500 and len(text) / len(lines) <= 80 and letters >= 0.4
    return text if ordinary else None


def _read_many(paths: list[Path]) -> list[str | None]:
    return [_read(path) for path in paths]


def gather(workers: int) -> Iterator[tuple[Package, list[Source]]]:
    """Each permissive package with its files, without those seen before it."""
    found = [_standard_library()]
    by_name = {d.metadata["Name"]: d for d in distributions() if d.metadata["Name"]}
    found += filter(None, (_of_distribution(by_name[n]) for n in sorted(by_name, key=str.lower)))
    paths = [path for *_, files in found for _, path in files]
    chunks = [paths[i : i + 64] for i in range(0, len(paths), 64)]
    with ProcessPoolExecutor(workers) as pool:
        texts = [text for chunk in pool.map(_read_many, chunks) for text in chunk]
    seen: set[bytes] = set()
    at = 0
    for name, version, licence, files in found:
        sources, total = [], hashlib.sha256()
        for (path, _), text in zip(files, texts[at : at + len(files)], strict=True):
            if text is None:
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen:
                continue
            seen.add(digest)
            total.update(text.encode())
            sources.append(Source(name, path, text))
        at += len(files)
        if sources:
            size = sum(len(s.text.encode()) for s in sources)
            yield Package(name, version, licence, len(sources), size, total.hexdigest()), sources


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE without normalisation: decoding gives the very bytes back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, sources: list[Source]) -> tuple[np.ndarray, np.ndarray]:
    """All files in turn, each closed by end-of-text: ids uint16, and where files start."""
    parts, starts, at = [], [], 0
    for i in range(0, len(sources), 2048):
        batch = [s.text for s in sources[i : i + 2048]]
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            ids = np.fromiter((*encoding.ids, 0), dtype=np.uint16)
            parts.append(ids)
            starts.append(at)
            at += len(ids)
    return np.concatenate(parts), np.array(starts, dtype=np.int64)


def write_corpus(folder: Path, workers: int, vocab_size: int = 4096) -> dict[str, object]:
    """Write train.npy, heldout.npy (uint16), what they hold, tokenizer.json and corpus.json.

    A tokenizer.json that lies in the folder already is used as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    packages: list[Package] = []
    train: list[Source] = []
    held_out: list[Source] = []
    for package, sources in gather(workers):
        packages.append(package)
        for source in sources:
            (held_out if source.held_out else train).append(source)
    path = folder / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        sample = [s.text for s in train if hashlib.sha256(s.path.encode()).digest()[0] < 80]
        tokenizer = train_tokenizer(sample, vocab_size)
        tokenizer.save(str(path))
    order = np.random.default_rng(0).permutation(len(train))
    ids, _ = encode(tokenizer, [train[i] for i in order])
    np.save(folder / "train.npy", ids)
    held_ids, starts = encode(tokenizer, held_out)
    np.save(folder / "heldout.npy", held_ids)
    names = [
        {"package": s.package, "path": s.path, "start": int(at)}
        for s, at in zip(held_out, starts, strict=True)
    ]
    (folder / "heldout_files.json").write_text(json.dumps(names))
    licences = licence_texts({s.package for s in held_out})
    (folder / "heldout_licences.json").write_text(json.dumps(licences))
    record: dict[str, object] = {
        "packages": [asdict(p) for p in packages],
        "train": {"files": len(train), "tokens": len(ids)},
        "heldout": {"files": len(held_out), "tokens": len(held_ids), "one_in": HELD_OUT_OF},
        "vocab_size": tokenizer.get_vocab_size(),
        "train_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        "heldout_sha256": hashlib.sha256(held_ids.tobytes()).hexdigest(),
    }
    (folder / "corpus.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=4096)
    args = parser.parse_args()
    record = write_corpus(args.folder, args.workers, args.vocab_size)
    print(json.dumps({k: v for k, v in record.items() if k != "packages"}))


if __name__ == "__main__":
    main()
