/* Activations of one vector, over vec.h, and a gated layer's function of gate and up. */

/* 0.5 (1 + tanh u) is sigmoid(2u). */
INLINE vf v_gelu_tanh(vf x) {
    vf u = v_fma(x * x * x, v_set(0.0713548163f), x * v_set(1.59576912f));
    return x * v_sigmoid(u);
}

/* x Phi(x) by erfc(z) = t exp(-z^2 + P(t)), t = 1 / (1 + z/2): P is our Chebyshev fit on 0 <= z <= 10, with a relative
 * error of 5e-8, so the negative tail is as exact as the rest. */
INLINE vf v_gelu_erf(vf x) {
    vf z = v_abs(x) * v_set(0.70710678f);
    vf t = v_set(1.0f) / v_fma(v_set(0.5f), z, v_set(1.0f));
    vf p = v_set(0.14493021f);
    p = v_fma(p, t, v_set(-0.6808272f));
    p = v_fma(p, t, v_set(1.15673375f));
    p = v_fma(p, t, v_set(-0.69625187f));
    p = v_fma(p, t, v_set(-0.08028043f));
    p = v_fma(p, t, v_set(0.00126758709f));
    p = v_fma(p, t, v_set(0.0346027985f));
    p = v_fma(p, t, v_set(0.3866404f));
    p = v_fma(p, t, v_set(0.9986328f));
    p = v_fma(p, t, v_set(-1.265448f));
    vf half = v_set(0.5f) * x * (t * v_exp(v_fma(-z, z, p)));
    return v_if_less(x, v_zero(), half, x - half);
}

/* A NaN stays NaN, because v_min and v_max then return their second operand. */
INLINE vf v_point(vf x, int activation) {
    if (activation == ACT_SILU) return x * v_sigmoid(x);
    if (activation == ACT_GELU_TANH) return v_gelu_tanh(x);
    if (activation == ACT_GELU) return v_gelu_erf(x);
    if (activation == ACT_QUICK_GELU) return x * v_sigmoid(x * v_set(QUICK_GELU_ALPHA));
    if (activation == ACT_SIGMOID) return v_sigmoid(x);
    x = v_max(v_zero(), x);
    if (activation == ACT_RELU2) x = x * x;
    return x;
}

INLINE vf v_activate(vf gate, vf up, int activation) {
    if (activation != ACT_CLAMPED_SWIGLU) return v_point(gate, activation) * up;
    gate = v_min(v_set(SWIGLU_LIMIT), gate);
    up = v_max(v_set(-SWIGLU_LIMIT), v_min(v_set(SWIGLU_LIMIT), up));
    return gate * v_sigmoid(gate * v_set(SWIGLU_ALPHA)) * (up + v_set(1.0f));
}
