"""TF-Agents: agents trained on trajectories that are made up, as in its own tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from field_programs.program import LEGACY_KERAS, Program, Running

_BATCH, _STEPS, _OBSERVED = 64, 4, 16


def _specs(discrete: bool) -> tuple[Any, Any]:
    import tensorflow as tf
    from tf_agents.specs import BoundedTensorSpec, TensorSpec
    from tf_agents.trajectories import time_step_spec

    action = (
        BoundedTensorSpec((), tf.int64, 0, 3)
        if discrete
        else BoundedTensorSpec((2,), tf.float32, -1.0, 1.0)
    )
    return time_step_spec(TensorSpec((_OBSERVED,), tf.float32)), action


def _experience(agent: Any, steps: int) -> Any:
    """Makes trajectories of the agent's own specification, with a last step in the middle."""
    import tensorflow as tf

    rng = np.random.default_rng(1)

    def made(spec: Any) -> Any:
        shape = (_BATCH, steps, *spec.shape)
        if spec.dtype.is_floating:
            return tf.constant(rng.normal(size=shape).astype(spec.dtype.as_numpy_dtype))
        if spec.dtype == tf.int32:  # step types
            return tf.ones(shape, tf.int32)
        return tf.constant(rng.integers(0, 4, shape))

    found = tf.nest.map_structure(made, agent.collect_data_spec)
    discount = tf.constant((rng.random((_BATCH, steps)) > 0.2).astype("float32"))
    # Whole episodes: the first step, steps in the middle, and one behind which nothing comes.
    kinds = np.tile([0] + [1] * (steps - 1) + [2], (_BATCH, 1)).astype("int32")
    return found._replace(
        discount=discount,
        # What a policy can have done: within its bounds, with deviations that make that likely.
        action=tf.tanh(found.action) if found.action.dtype.is_floating else found.action,
        policy_info=tf.nest.map_structure(lambda x: tf.exp(tf.tanh(x)), found.policy_info),
        step_type=tf.constant(kinds[:, :-1]),
        next_step_type=tf.constant(kinds[:, 1:]),
    )


def _trained(agent: Any, steps: int = 2) -> Running:
    """Trains as its tutorials do, with `common.function`, and asks the policy."""
    import tensorflow as tf
    from tf_agents.trajectories import restart
    from tf_agents.utils import common

    agent.initialize()
    experience = _experience(agent, steps)
    train = common.function(agent.train)
    policy = agent.policy
    act = common.function(policy.action)
    seen = np.random.default_rng(2).normal(size=(_BATCH, _OBSERVED)).astype("float32")

    def outputs() -> dict[str, Any]:
        state = policy.get_initial_state(_BATCH)
        return {"action": act(restart(tf.constant(seen), _BATCH), state).action}

    return Running(lambda: float(train(experience).loss), outputs)


def _q(kind: str) -> Running:
    import tensorflow as tf
    from tf_agents.agents.categorical_dqn import categorical_dqn_agent
    from tf_agents.agents.dqn import dqn_agent
    from tf_agents.networks import categorical_q_network, q_network, q_rnn_network

    tf.keras.utils.set_random_seed(1)
    seen, action = _specs(discrete=True)
    optimizer = tf.keras.optimizers.legacy.Adam(1e-3)
    layers = {"fc_layer_params": (256, 256)}
    if kind == "c51":
        network = categorical_q_network.CategoricalQNetwork(seen.observation, action, **layers)
        return _trained(
            categorical_dqn_agent.CategoricalDqnAgent(
                seen, action, categorical_q_network=network, optimizer=optimizer
            )
        )
    if kind == "recurrent":
        network = q_rnn_network.QRnnNetwork(seen.observation, action, lstm_size=(128,))
        return _trained(dqn_agent.DqnAgent(seen, action, network, optimizer), _STEPS)
    network = q_network.QNetwork(seen.observation, action, **layers)
    agent = {"dqn": dqn_agent.DqnAgent, "double": dqn_agent.DdqnAgent}[kind]
    return _trained(agent(seen, action, network, optimizer))


def _actor_critic(kind: str) -> Running:
    import tensorflow as tf
    from tf_agents.agents.ddpg import actor_network, critic_network, ddpg_agent
    from tf_agents.agents.sac import sac_agent
    from tf_agents.agents.td3 import td3_agent
    from tf_agents.networks import actor_distribution_network

    tf.keras.utils.set_random_seed(1)
    seen, action = _specs(discrete=False)
    adam = tf.keras.optimizers.legacy.Adam
    critic = critic_network.CriticNetwork(
        (seen.observation, action),
        observation_fc_layer_params=(256,),
        joint_fc_layer_params=(256,),
    )
    if kind == "sac":
        actor: Any = actor_distribution_network.ActorDistributionNetwork(
            seen.observation, action, fc_layer_params=(256, 256)
        )
        agent: Any = sac_agent.SacAgent(
            seen, action, critic, actor, adam(1e-3), adam(1e-3), adam(1e-3)
        )
        return _trained(agent)
    actor = actor_network.ActorNetwork(seen.observation, action, fc_layer_params=(256, 256))
    agents = {"ddpg": ddpg_agent.DdpgAgent, "td3": td3_agent.Td3Agent}
    agent = agents[kind](seen, action, actor, critic, adam(1e-3), adam(1e-3))
    return _trained(agent)


def _policy_gradient(kind: str) -> Running:
    import tensorflow as tf
    from tf_agents.agents.ppo import ppo_clip_agent
    from tf_agents.agents.reinforce import reinforce_agent
    from tf_agents.networks import actor_distribution_network, value_network

    tf.keras.utils.set_random_seed(1)
    seen, action = _specs(discrete=False)
    actor = actor_distribution_network.ActorDistributionNetwork(
        seen.observation, action, fc_layer_params=(256, 256)
    )
    value = value_network.ValueNetwork(seen.observation, fc_layer_params=(256, 256))
    optimizer = tf.keras.optimizers.legacy.Adam(1e-3)
    if kind == "reinforce":
        agent: Any = reinforce_agent.ReinforceAgent(
            seen, action, actor, optimizer, value_network=value, value_estimation_loss_coef=0.5
        )
    else:
        agent = ppo_clip_agent.PPOClipAgent(
            seen,
            action,
            optimizer,
            actor_net=actor,
            value_net=value,
            num_epochs=2,
            importance_ratio_clipping=0.2,
        )
    return _trained(agent, _STEPS)


def _program(name: str, build: Callable[[], Running]) -> Program:
    return Program(f"tf_agents/{name}", ("tf_agents", "tf_keras"), build, LEGACY_KERAS)


PROGRAMS = [
    _program("dqn", lambda: _q("dqn")),
    _program("double_dqn", lambda: _q("double")),
    _program("recurrent_dqn", lambda: _q("recurrent")),
    _program("c51", lambda: _q("c51")),
    _program("ddpg", lambda: _actor_critic("ddpg")),
    _program("td3", lambda: _actor_critic("td3")),
    _program("sac", lambda: _actor_critic("sac")),
    _program("reinforce", lambda: _policy_gradient("reinforce")),
    _program("ppo", lambda: _policy_gradient("ppo")),
]
