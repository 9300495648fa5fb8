"""How ``pico`` was trained: corpus, tokenizer, target, its greedy continuations, drafter, measures.

``python -m specpilot.harness.deployments.pico.train.run --out DIR --minutes-target 8 ...`` does all
of it on a machine with a GPU. Serving code never imports this package.
"""
