"""Losses of a linear layer whose logits never exist as a whole.

``linear_cross_entropy``, ``linear_log_prob`` and ``linear_loss`` hold the public functions; ``operands`` what
they share before a native call, ``operators`` the native calls, ``autograd`` how losses return gradients,
``streaming`` the passes of ``linear_loss``; ``labels``, ``memory`` and ``reference`` what their names say.
"""
