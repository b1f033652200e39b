"""Scheduled HLO text, read: instructions and loops, matrix products, attention, collectives, and bytes moved."""

from ultrascale_jax.hlo.program import Array as Array
from ultrascale_jax.hlo.program import Dot as Dot
from ultrascale_jax.hlo.program import Instruction as Instruction
from ultrascale_jax.hlo.program import Matmul as Matmul
from ultrascale_jax.hlo.program import Module as Module
from ultrascale_jax.hlo.program import is_heavy as is_heavy
from ultrascale_jax.hlo.program import matmuls as matmuls
from ultrascale_jax.hlo.program import parse as parse
