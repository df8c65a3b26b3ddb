"""Row-wise ops between the big kernels, at memory speed, and linear layers with such ops around them: one file each,
with their Triton kernels in `triton/`."""

from flashkernels.fused.cross_entropy import (
    cross_entropy as cross_entropy,
    linear_cross_entropy as linear_cross_entropy,
)
from flashkernels.fused.linear import linear as linear, norm_linear as norm_linear
from flashkernels.fused.sampling import Sampled as Sampled, sample as sample
from flashkernels.fused.speculative import Accepted as Accepted, speculative_accept as speculative_accept
