"""Medusa-1's drafter (arXiv 2401.10774): independent heads on the target's post-norm state fill a static tree.

The heads are in models/drafts/medusa.py; infer/drafters/heads.py drafts with them.
"""

from longdraft.infer.drafters.heads import HeadsDrafter, Shape
from longdraft.models.drafts.medusa import Medusa
from longdraft.models.schema import Instance, validated
from longdraft.models.target import Target


class MedusaDrafter(HeadsDrafter):
    """Ranks every head's tokens, with the step's noise at T > 0, and places them in a static tree.

    Args:
        target: the loaded target (models/target.py).
        draft: trained heads, in the target's dtype and on its device.
        shape: which rank combinations are nodes, or the number of ranks in each level of a full Cartesian tree; None
            means 3 ranks for each head. A lower `max_nodes` leaves its first nodes.
    """

    @validated
    def __init__(self, target: Instance[Target], draft: Instance[Medusa], shape: Shape | None = None):
        super().__init__(target, draft, shape)
