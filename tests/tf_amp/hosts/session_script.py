"""A training script of TensorFlow 1, as its users have it: it knows nothing of mixed precision."""

import json

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
rng = np.random.RandomState(0)
images, labels = rng.randn(64, 8, 8, 3).astype(np.float32), rng.randint(0, 4, 64)


def train(optimizer, steps=12):
    x = tf.placeholder(tf.float32, [None, 8, 8, 3])
    y = tf.placeholder(tf.int64, [None])
    kernel = tf.get_variable("kernel", [3, 3, 3, 8], initializer=tf.glorot_uniform_initializer(1))
    net = tf.nn.relu(tf.nn.conv2d(x, kernel, [1, 1, 1, 1], "SAME"))
    net = tf.reshape(net, [-1, 8 * 8 * 8])
    weight = tf.get_variable("weight", [512, 4], initializer=tf.glorot_uniform_initializer(2))
    logits = tf.matmul(net, weight)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    step = tf.train.get_or_create_global_step()
    train_op = optimizer.minimize(loss, global_step=step)
    metadata = tf.RunMetadata()
    options = tf.RunOptions(output_partition_graphs=True)
    with tf.train.MonitoredTrainingSession() as session:
        feed = {x: images, y: labels}
        losses = [float(session.run([loss, train_op], feed)[0]) for _ in range(steps)]
        count = int(session.run(step))
        session.run([loss, train_op], feed, options=options, run_metadata=metadata)
    dtypes = {
        f"{node.op.replace('_MklNative', '')}:{tf.as_dtype(node.attr['T'].type).name}"
        for graph in metadata.partition_graphs
        for node in graph.node
        if node.op.replace("_MklNative", "") in ("MatMul", "Conv2D", "Conv2DBackpropFilter")
    }
    return {"losses": losses, "steps": count, "dtypes": sorted(dtypes)}


if __name__ == "__main__":
    facts = train(tf.train.MomentumOptimizer(0.05, 0.9))
    print("@@" + json.dumps({"name": "script", **facts}))
