"""The autoregressive teacher, supervised part: fine-tuning on reasoning traces."""

from __future__ import annotations

from recbole_dgr2.trainer.supervised import Supervised


class ARTeacher(Supervised):
    """SFT on traces, with the loss of `Supervised`.

    Source: Diffusion-GR2 (arXiv 2607.01170) and GR2, SFT objective, `w_r < w_a`.
    """

    name = "ar_teacher"
