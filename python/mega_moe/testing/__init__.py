"""What the project's own tests and its users' tests share: an fp64 reference, random problems, a count of calls."""

from mega_moe.testing.calls import count_op_calls
from mega_moe.testing.problem import Problem, random_problem, relative_l2
from mega_moe.testing.reference import Gradients, fp64_moe, fp64_moe_grads

__all__ = [
    "Gradients",
    "Problem",
    "count_op_calls",
    "fp64_moe",
    "fp64_moe_grads",
    "random_problem",
    "relative_l2",
]
