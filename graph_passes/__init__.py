"""A mixed-precision pass over TensorFlow graphs, in Python.

    from graph_passes import PrecisionConfig, rewrite_graph_def

    result = rewrite_graph_def(graph_def, PrecisionConfig(target_dtype="bfloat16", device="CPU"))
    result.graph_def, result.report.summary()

The package reads protos and TensorFlow's op and kernel registries. It reads no environment, runs
no op and starts no session, so it may be called from TensorFlow's own threads while a graph is
being built.
"""

from graph_passes.driver import rewrite_function_def, rewrite_graph_def
from graph_passes.ops.reasons import Reason
from graph_passes.policy.config import RULES, ListEdit, PrecisionConfig
from graph_passes.policy.op_lists import OpLists, list_notes, load_op_lists
from graph_passes.policy.rules import Rule, RulesError, format_rules, load_rules
from graph_passes.remarks import FunctionRemarks, Remark
from graph_passes.report import Report
from graph_passes.result import RewriteResult

__all__ = [
    "PrecisionConfig",
    "ListEdit",
    "RULES",
    "Rule",
    "RulesError",
    "load_rules",
    "format_rules",
    "rewrite_graph_def",
    "rewrite_function_def",
    "RewriteResult",
    "Report",
    "Reason",
    "FunctionRemarks",
    "Remark",
    "OpLists",
    "load_op_lists",
    "list_notes",
]
