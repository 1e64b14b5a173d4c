"""Losses of a linear layer whose logits never exist as a whole.

A public function checks its arguments, packs those of all heads into ``options.HeadOptions`` and calls
``operands.prepare``, which makes a ``HeadCall``: operands, formula and memory options, as every native
operator on a head takes them. ``autograd.HeadLoss`` runs it and returns gradients. Where something comes
between the products, a function of Python (``linear_loss``) or an exchange (``tigon.parallel``),
``driver.RowPass`` goes over the chunks. ``labels`` knows which rows count, ``plan`` what a call takes,
``reference`` the formula in plain PyTorch; ``multi_token`` runs several heads in turn, ``top_k`` distils from
a few classes, and ``contrastive`` has documents in the place of classes.
"""
