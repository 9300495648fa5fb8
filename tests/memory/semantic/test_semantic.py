"""The vector index and its worker, with a small encoder and collection in place of the large."""

import hashlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from specpilot.memory.semantic.client import SemanticClient, socket_path
from specpilot.memory.semantic.encoder import available
from specpilot.memory.semantic.index import VectorIndex
from specpilot.memory.semantic.worker import serve
from specpilot.memory.store import MemoryStore
from specpilot.memory.text import index_terms

BY = {"author": "a test", "origin": "person", "created": "2026-11-29"}


class Words:
    """An encoder that hashes words into 256 dimensions: near texts share words."""

    model = "words"

    def __init__(self):
        self.encoded = 0

    def encode(self, texts):
        self.encoded += len(texts)
        vectors = np.zeros((len(texts), 256), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in index_terms(text):
                vectors[row, hashlib.sha256(word.encode()).digest()[0]] += 1
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


class Rows(dict):
    """A collection with chroma's three methods, exact and in memory."""

    def upsert(self, *, ids, embeddings):
        self.update(zip(ids, np.asarray(embeddings), strict=True))

    def query(self, *, query_embeddings, n_results, include):
        question = np.asarray(query_embeddings[0])
        ranked = sorted(((1 - float(v @ question), id) for id, v in self.items()))[:n_results]
        return {"ids": [[id for _, id in ranked]], "distances": [[d for d, _ in ranked]]}

    def count(self):
        return len(self)


def find(store, scores):
    columns = store.columns()
    best = max(scores, key=scores.__getitem__)
    return columns.cards[columns.position[best]].id


@pytest.fixture
def pair(store):
    """The store that tests write, and another connection to it as the worker has."""
    with MemoryStore(store.database.path) as other:
        yield store, other


def test_new_heads_are_taken_in_and_found(pair, raw):
    store, other = pair
    encoder = Words()
    index = VectorIndex(other, encoder, Rows())
    store.propose(raw())
    store.propose(raw(id="admission", title="Prompts wait until slots are free again"))
    assert index.refresh() == 2
    assert index.refresh() == 0
    assert find(store, index.scores("prompts wait for free slots", 10)) == "admission"
    store.propose(raw(id="kernels", title="Kernels near their floor need no tuning"))
    assert index.refresh() == 1
    assert find(store, index.scores("kernels near floor tuning", 10)) == "kernels"


def test_a_restart_encodes_nothing_anew(pair, raw):
    store, other = pair
    store.propose(raw())
    VectorIndex(other, Words(), Rows()).refresh()
    again = Words()
    index = VectorIndex(other, again, Rows())
    assert index.refresh() == 1
    assert again.encoded == 0
    assert index.scores("narrow tree", 5)


def test_a_revision_that_keeps_the_text_is_not_encoded_again(pair, raw):
    store, other = pair
    encoder = Words()
    index = VectorIndex(other, encoder, Rows())
    store.propose(raw())
    index.refresh()
    store.revise("narrow-tree", 1, {"note": "seen again", "provenance": BY})
    assert index.refresh() == 1
    assert encoder.encoded == 1


def test_vectors_change_the_ranking_and_say_so(pair, raw):
    store, _ = pair
    for number in range(3):
        store.propose(raw(id=f"entry-{number}", title=f"Entry number {number} of the three"))
    row = store.columns().rows[2]
    found = store.search("something else", vectors=lambda text: {row: 0.9, row - 1: 0.1})
    assert (found.hits[0].id, found.semantic) == ("entry-2", "ready")
    assert store.search("entry", vectors=lambda text: None).semantic == "warming"
    assert store.search("entry").semantic == "off"


@pytest.fixture
def worker(store, raw, tmp_path):
    """A worker in a thread whose encoder loads only when the test lets it."""
    store.propose(raw())
    path = socket_path(store.database.path)
    let, done = threading.Event(), threading.Event()

    def load():
        let.wait(10)
        return VectorIndex(MemoryStore(store.database.path), Words(), Rows())

    thread = threading.Thread(target=serve, args=(path, load, 60, lambda: not done.is_set()))
    thread.start()
    while not path.exists():
        time.sleep(0.01)
    yield path, let
    let.set()
    done.set()
    thread.join(10)
    assert not thread.is_alive()
    assert not path.exists()


def test_until_the_encoder_is_ready_the_answer_is_none_and_then_it_is_scores(store, worker, raw):
    _, let = worker
    client = SemanticClient(store.database.path, start=False)
    started = time.perf_counter()
    assert client.scores("narrow tree") is None
    assert time.perf_counter() - started < 0.5
    let.set()
    deadline = time.monotonic() + 5
    while (scores := client.scores("narrow tree")) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert find(store, scores) == "narrow-tree"
    store.propose(raw(id="later", title="Prompts wait until slots are free again"))
    assert find(store, client.scores("prompts wait for free slots")) == "later"
    client.close()


def test_a_second_worker_leaves_the_first_alone(worker):
    path, _ = worker
    started = time.monotonic()
    serve(path, lambda: pytest.fail("loaded twice"), idle_s=30)
    assert time.monotonic() - started < 5
    assert path.exists()


def test_a_worker_that_nobody_asks_ends(store):
    path = socket_path(store.database.path)
    serve(path, lambda: VectorIndex(store, Words(), Rows()), idle_s=0.1)
    assert not path.exists()


def test_only_the_user_may_ask(worker):
    path, _ = worker
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("line", [b"{\n", b"[]\n", b'{"text": 1, "limit": 5}\n',
                                  b'{"text": "x", "limit": 0}\n', b"\xff\xfe\n"])  # fmt: skip
def test_a_malformed_request_ends_its_connection_only(store, worker, line):
    path, let = worker
    let.set()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(str(path))
        connection.sendall(line)
        assert connection.recv(100) == b""
    client = SemanticClient(store.database.path, start=False)
    deadline = time.monotonic() + 5
    while client.scores("narrow tree") is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.scores("narrow tree")
    client.close()


def test_without_the_packages_no_worker_is_started(store, monkeypatch):
    monkeypatch.setattr("specpilot.memory.semantic.client.available", lambda: False)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("started a worker"))
    assert SemanticClient(store.database.path).scores("narrow tree") is None


def test_a_long_path_gets_a_short_socket(tmp_path):
    long = tmp_path / ("x" * 120) / "memory.sqlite"
    assert len(os.fsencode(socket_path(long))) < 108
    assert socket_path(long) != socket_path(long.with_name("other.sqlite"))


def test_searching_and_asking_load_no_heavy_package(tmp_path):
    code = """
import json, sys
from specpilot.memory.store import MemoryStore
from specpilot.memory.semantic.client import SemanticClient
from specpilot.memory import transfer, distill, exchange, checks, seeding
with MemoryStore(sys.argv[1]) as store:
    store.search("trees", vectors=SemanticClient(store.database.path, start=False).scores)
print(json.dumps(sorted({"torch", "chromadb", "sentence_transformers", "transformers", "scipy",
                         "mcp"} & set(sys.modules))))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path / "m.sqlite")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == []


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="needs specpilot[semantic]")
def test_the_real_worker_finds_by_meaning(seeded):
    client = SemanticClient(seeded.database.path)
    deadline = time.monotonic() + 120
    while (scores := client.scores("a second device drafts while the first verifies")) is None:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:5]
    columns = seeded.columns()
    seeded.database.path.unlink()  # the worker ends when its store is gone
    assert "ssd-saguaro" in {columns.cards[columns.position[row]].id for row in best}
