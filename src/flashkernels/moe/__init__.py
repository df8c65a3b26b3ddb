"""Mixture of experts: routing with its regrouping, grouped GEMMs, and the whole layer."""

from flashkernels.moe.combine import combine as combine
from flashkernels.moe.explain import explain as explain
from flashkernels.moe.gemm import grouped_gemm as grouped_gemm
from flashkernels.moe.layer import Layered as Layered, MoE as MoE, layer as layer
from flashkernels.moe.losses import balance_loss as balance_loss, z_loss as z_loss
from flashkernels.moe.plan import Plan as Plan
from flashkernels.moe.route import Routing as Routing, presorted as presorted, regroup as regroup, route as route
from flashkernels.moe.rows import round_rows as round_rows
from flashkernels.moe.weights import Quantised as Quantised, dequantise as dequantise, quantise as quantise
