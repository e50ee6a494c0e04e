// Products of few rows of many clients with their own weights, in float32. Built for one shape at a
// time: N rows, I inputs, O outputs. x (client, N, I), w (client, O, I), bias (client, O).
// Built by linear_gpu.py.
#ifndef EMULATED
#define ANYWHERE __host__ __device__
#define SHARED extern __shared__ __align__(16) float sm[]
#define KERNEL(threads, blocks) extern "C" __global__ __launch_bounds__(threads, blocks) void
#endif
ANYWHERE constexpr int up(int a, int b) { return (a + b - 1) / b; }
constexpr int EACH = 4, WARPS = 4, PIECE = 512, THREADS = 128, PARTS = up(I, THREADS), OBLK = up(O, EACH * WARPS), NP = up(N, 4) * 4, ALL = EACH * N;

// A warp has EACH outputs, its lanes share the inputs.
KERNEL(THREADS, 4) linear(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias, float* __restrict__ out) {
  SHARED;  // [N][PIECE], then [WARPS][ALL][33]
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, first = (blockIdx.x % OBLK * WARPS + warp) * EACH;
  const size_t client = blockIdx.x / OBLK;
  float acc[EACH][N] = {};
#pragma unroll 1
  for (int begin = 0; begin < I; begin += PIECE) {
    const int size = I - begin < PIECE ? I - begin : PIECE;
    for (int i = tid; i < N * PIECE / 4; i += THREADS)
      if (i % (PIECE / 4) * 4 < size) ((float4*)sm)[i] = *(const float4*)(x + (client * N + i / (PIECE / 4)) * I + begin + i % (PIECE / 4) * 4);
    __syncthreads();
#pragma unroll 2
    for (int i = lane * 4; i < size; i += 128) {
      float4 v[EACH];
#pragma unroll
      for (int o = 0; o < EACH; o++) v[o] = *(const float4*)(w + (client * O + (first + o < O ? first + o : 0)) * I + begin + i);
#pragma unroll
      for (int n = 0; n < N; n++) {
        const float4 u = *(const float4*)(sm + n * PIECE + i);
#pragma unroll
        for (int o = 0; o < EACH; o++) acc[o][n] += u.x * v[o].x + u.y * v[o].y + u.z * v[o].z + u.w * v[o].w;
      }
    }
    __syncthreads();
  }
  float* own = sm + warp * ALL * 33;
#pragma unroll
  for (int o = 0; o < EACH; o++)
#pragma unroll
    for (int n = 0; n < N; n++) own[(o * N + n) * 33 + lane] = acc[o][n];
  __syncwarp();
  for (int k = lane; k < ALL; k += 32) {
    float all = 0.f;
    for (int i = 0; i < 32; i++) all += own[k * 33 + i];
    const int o = first + k / N;
    if (o < O) out[(client * N + k % N) * O + o] = all + (bias ? bias[client * O + o] : 0.f);
  }
}

// A thread has an input: its gradients by the outputs, and those of its weights.
KERNEL(THREADS, 4) linear_back(const float* __restrict__ g, const float* __restrict__ x, const float* __restrict__ w,
                           float* __restrict__ dx, float* __restrict__ dw, float* __restrict__ db) {
  SHARED;  // [O][NP]
  const int tid = threadIdx.x, i = blockIdx.x % PARTS * THREADS + tid;
  const size_t client = blockIdx.x / PARTS;
  for (int k = tid; k < N * O; k += THREADS) sm[k % O * NP + k / O] = g[client * N * O + k];
  __syncthreads();
  if (db && blockIdx.x % PARTS == 0)
    for (int o = tid; o < O; o += THREADS) {
      float all = 0.f;
#pragma unroll
      for (int n = 0; n < N; n++) all += sm[o * NP + n];
      db[client * O + o] = all;
    }
  if (i >= I) return;
  float in[N], to[N] = {};
#pragma unroll
  for (int n = 0; n < N; n++) in[n] = x[(client * N + n) * I + i];
  const float* ws = w + client * O * I + i;
  float* ds = dw + client * O * I + i;
#pragma unroll 8
  for (int o = 0; o < O; o++) {
    const float v = ws[(size_t)o * I];
    float all = 0.f;
#pragma unroll
    for (int n = 0; n < NP; n += 4) {
      const float4 d = *(const float4*)(sm + o * NP + n);
      const float part[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
      for (int k = 0; k < 4; k++)
        if (n + k < N) { all += part[k] * in[n + k]; to[n + k] += part[k] * v; }
    }
    ds[(size_t)o * I] = all;
  }
  if (dx) {
#pragma unroll
    for (int n = 0; n < N; n++) dx[(client * N + n) * I + i] = to[n];
  }
}
