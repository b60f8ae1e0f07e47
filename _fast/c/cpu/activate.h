/* Activations of one vector, over vec.h: GELU, and what a gated layer makes of gate and up. */

/* 0.5 (1 + tanh u) is sigmoid(2u). */
INLINE vf v_gelu_tanh(vf x) {
    vf u = v_fma(x * x * x, v_set(0.0713548163f), x * v_set(1.59576912f));
    return x * v_sigmoid(u);
}

/* A NaN stays NaN: v_min and v_max return their second operand then. */
INLINE vf v_activate(vf gate, vf up, int activation) {
    if (activation == ACT_SILU) return gate * v_sigmoid(gate) * up;
    if (activation == ACT_GELU_TANH) return v_gelu_tanh(gate) * up;
    gate = v_min(v_set(SWIGLU_LIMIT), gate);
    up = v_max(v_set(-SWIGLU_LIMIT), v_min(v_set(SWIGLU_LIMIT), up));
    return gate * v_sigmoid(gate * v_set(SWIGLU_ALPHA)) * (up + v_set(1.0f));
}
