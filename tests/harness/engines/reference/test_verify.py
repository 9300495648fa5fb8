"""A verify pass over trees equals decoding each path, and commits exactly the accepted one."""

import random

import pytest
import torch

from specpilot.harness.engines.reference.target import Target
from specpilot.mechanisms.trees.tree import Tree

KINDS = ["hybrid", "qwen3", "llama"]


def random_tree(rng: random.Random, rows: int) -> Tree:
    """A tree of ``rows`` nodes, some long branches, siblings distinct."""
    parent = [-1] + [rng.randrange(max(0, n - 4), n) for n in range(1, rows)]
    tokens = rng.sample(range(97), rows)
    return Tree.of(tokens, parent, vocab_size=97)


def prefilled(target: Target, lengths: list[int]):
    """A pool whose slots hold random prompts, and the prompts."""
    pool = target.pool(len(lengths), 128)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 97, (n,), generator=generator) for n in lengths]
    for slot, ids in enumerate(prompts):
        target.prefill(ids, pool, slot, 0)
    return pool, prompts


def replayed(target: Target, ids: torch.Tensor):
    """The last token's hidden state and the whole state of a pool that saw ``ids`` one by one."""
    pool = target.pool(1, 128)
    for i in range(len(ids)):
        hidden = target.decode(ids[i, None], pool, [i]).hidden[0, 0]
    return hidden, pool.snapshot(0, len(ids))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_every_node_of_a_tree_has_the_logits_of_plain_decoding(kind, folder):
    target = Target(folder(kind), torch.float64)
    rng = random.Random(1)
    lengths = [3, 21, 70]
    pool, prompts = prefilled(target, lengths)
    trees = [random_tree(rng, rows) for rows in (12, 5, 17)]
    hidden = target.verify(trees, pool, lengths).output.hidden
    for r, tree in enumerate(trees):
        for node in range(tree.rows):
            path = torch.tensor([tree.tokens[n] for n in tree.path(node)])
            expected, _ = replayed(target, torch.cat((prompts[r], path)))
            torch.testing.assert_close(
                target.logits(hidden[r, node]), target.logits(expected), atol=1e-10, rtol=0
            )


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_committed_state_equals_replay_over_many_cycles(kind, folder):
    target = Target(folder(kind), torch.float64)
    rng = random.Random(2)
    lengths = [1, 30]
    pool, texts = prefilled(target, lengths)
    for _ in range(6):
        trees = [random_tree(rng, rng.choice((1, 2, 9, 16))) for _ in lengths]
        verified = target.verify(trees, pool, lengths)
        paths = [tree.path(rng.randrange(tree.rows)) for tree in trees]
        target.commit(verified, pool, paths)
        for r, path in enumerate(paths):
            tokens = torch.tensor([trees[r].tokens[n] for n in path])
            texts[r] = torch.cat((texts[r], tokens))
            lengths[r] += len(path)
    for r, text in enumerate(texts):
        _, expected = replayed(target, text)
        for name, got in pool.snapshot(r, lengths[r]).items():
            torch.testing.assert_close(got, expected[name], atol=1e-10, rtol=0)


@torch.inference_mode()
def test_a_verify_pass_leaves_the_committed_state_alone(folder):
    target = Target(folder("hybrid"), torch.float64)
    pool, _ = prefilled(target, [9])
    before = pool.snapshot(0, 9)
    target.verify([random_tree(random.Random(3), 16)], pool, [9])
    for name, got in pool.snapshot(0, 9).items():
        assert torch.equal(got, before[name])
