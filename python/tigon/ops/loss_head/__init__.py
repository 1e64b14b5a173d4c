"""Losses of a linear layer whose logits never exist as a whole.

A public function (``linear_cross_entropy``, ``linear_log_prob``, ``linear_loss``, ``linear_preference``,
``linear_divergence``) checks its arguments and calls ``operands.prepare``, which makes a ``Call``: operands,
formula and memory options, as every native operator on a head takes them. ``autograd.HeadLoss`` runs it and
returns gradients. ``labels`` knows which rows count, ``plan`` what a call takes, ``reference`` the formula in
plain PyTorch; ``multi_token`` runs several heads in turn, ``top_k`` distils from a few classes.
"""
