"""A ping-pong server by a queue of events, and its best plan by trying everything."""

import heapq
import itertools
import math
from collections import deque


def token_step(attention, experts, sending, num_micro_batches, num_layers):
    """Time at which the last micro-batch is back, and the work of each station in order.

    Stations take what waits longest; nobody tells them the order of micro-batches.
    """
    lasts = (attention, sending, experts, sending)
    waiting = [deque() for _ in lasts]
    busy = [False] * len(lasts)
    log = [[] for _ in lasts]
    events, count, now = [], itertools.count(), 0.0
    waiting[0].extend((0, number) for number in range(num_micro_batches))

    def begin(time):
        for station, line in enumerate(waiting):
            if line and not busy[station]:
                work = line.popleft()
                busy[station] = True
                log[station].append(work)
                heapq.heappush(events, (time + lasts[station], next(count), station, work))

    begin(0.0)
    while events:
        now, _, station, (layer, number) = heapq.heappop(events)
        busy[station] = False
        if station < 3:
            waiting[station + 1].append((layer, number))
        elif layer + 1 < num_layers:
            waiting[0].append((layer + 1, number))
        begin(now)
    return now, log


def best_plan(model, load, pair, space, room, link, memory_rate):
    """``(tokens per second for the price, tp_a, n_a, tp_e, experts of a node, m, b_a)`` of the best
    plan without prompts, every batch of every shape tried against all of the constraints.

    Args:
      room: of a memory, what is planned with.
      link: of a link's rate, what is reached.
      memory_rate: of a memory's rate, what is reached.
    """
    h, layers, k = model.d_model, model.num_layers, model.experts_per_token
    keys, s = model.num_kv_heads * model.head_dim, load.prompt + load.completion / 2
    queries = model.num_heads * model.head_dim
    dense = 2 * h * (queries + keys) + h * model.num_experts
    expert = 3 * h * model.d_expert
    p_a = 2 * (model.parameters - expert * model.num_experts * layers)
    one, other = pair.attention, pair.experts

    def message(size, hardware):
        # A latency and a rate, at powers of two; in between the time is a power of the size.
        def exact(size):
            return size / (hardware.outside * link) + hardware.latency_outside

        low = 2.0 ** math.floor(math.log2(max(size, 256)))
        share = math.log(max(size, 256) / low) / math.log(2)
        return exact(low) ** (1 - share) * exact(2 * low) ** share

    def summed(tp, hardware):
        if tp == 1:
            return 0.0, 0.0
        rate = 2 * (tp - 1) / tp * h * 2 / (hardware.inside * link)
        return rate, 2 * (tp - 1) * hardware.latency_inside

    best = (0.0,)
    for tp_a, tp_e, held, m in itertools.product(
        space.tp_attention, space.tp_experts, space.experts_of_node, space.micro_batches
    ):
        if model.num_kv_heads % tp_a or model.d_expert % tp_e:
            continue
        n_e = model.num_experts // held
        if 2 * expert * held * layers >= room * other.memory * tp_e:
            continue
        for n_a in range(1, space.most_nodes + 1):
            for b_a in itertools.count(1):
                cached = 4 * m * b_a * s * keys * layers
                if cached + p_a >= tp_a * room * one.memory:  # (8)
                    break
                b_e = b_a * n_a * k / n_e
                of_token, latency = summed(tp_a, one)
                t_a = max(
                    2 * dense * b_a / (tp_a * one.peak * pair.efficiency),
                    2 * dense / (tp_a * one.memory_bandwidth * memory_rate),
                )
                t_a += b_a * 4 * keys * s / (tp_a * one.memory_bandwidth * memory_rate)
                t_a += b_a * of_token + latency
                of_token, latency = summed(tp_e, other)
                t_e = max(
                    2 * expert * b_e / (tp_e * other.peak * pair.efficiency),
                    2 * expert * held / (tp_e * other.memory_bandwidth * memory_rate),
                )
                t_e += b_e * of_token + latency
                t_c = max(
                    message(2 * b_a * h * k / tp_a, one), message(2 * b_e * h / tp_e, other)
                )  # (6)
                t_f = max(t_a, t_e)
                if max(m * t_f, t_a + t_e + 2 * t_c) * layers > load.slo:  # (7)
                    break
                if t_c >= t_f or m * t_f < t_a + t_e + 2 * t_c:  # (2), (3)
                    continue
                total = t_a + t_e + 2 * t_c + t_f * (m * layers - 1)  # (5)
                price = tp_a * n_a * pair.prices[0] + tp_e * n_e * pair.prices[1]
                value = b_a * m * n_a / total / price
                best = max(best, (value, tp_a, n_a, tp_e, held, m, b_a))
    return best
