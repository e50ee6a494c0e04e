// Convolution + bias + relu + maxima over windows of P x P, and its gradients, for many clients, each
// with its own filters, in float32. Built for one shape at a time by convolve_gpu.py, which defines
//   C H W O K P PAD RELU      the layer: channels, height, width, filters, sides, padding
//   F_ M_ D_ E_ X_            tiles of the kernels; a kernel without tiles is left out
// and reads the `facts` of each kernel: threads, bytes of shared memory, and parts of its grid.
// Layouts: images (client, n, C, H, W), filters (client, O, C, K, K), as torch has them. `code` is
// (client, n, O, HP, CODES): the place of the maximum in its window, or DEAD behind the rectifier.
// Of each window one pixel has a gradient, so the products with the others are never made. No block
// writes what another writes, and every sum has a fixed order: results are the same in every run.
#ifndef EMULATED
#define DEVICE __device__ __forceinline__
#define ANYWHERE __host__ __device__
__device__ __forceinline__ unsigned place_of(const void* s) { return (unsigned)__cvta_generic_to_shared(s); }
// Asynchronous copies to shared memory; zeros where `real` is false.
template <int BYTES> DEVICE void copy(void* s, const void* g, bool real = true) {
  if (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place_of(s)), "l"(g), "r"(real ? 16 : 0));
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(place_of(s)), "l"(g), "n"(BYTES), "r"(real ? BYTES : 0));
}
DEVICE void commit() { asm volatile("cp.async.commit_group;"); }
template <int LEFT> DEVICE void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT)); }
// Add to 16 x 8 the product of 16 x 8 and 8 x 8, spread over a warp.
DEVICE void multiply(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
                 "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
// A number that is the same in the whole warp, and known to be: branches on it need no barrier.
DEVICE unsigned uniform(unsigned x) { return __shfl_sync(~0u, x, 0); }
#define FACTS extern "C" __device__ int
#define SHARED extern __shared__ __align__(16) float sm[]
#define KERNEL(threads, blocks) extern "C" __global__ __launch_bounds__(threads, blocks) void
#endif

typedef unsigned char u8;
ANYWHERE constexpr int up(int a, int b) { return (a + b - 1) / b; }
ANYWHERE constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int T = K * K, CT = C * T, DEAD = 255;
constexpr int HP = (H + 2 * PAD - K + 1) / P, WP = (W + 2 * PAD - K + 1) / P;
constexpr int CODES = up(WP, 4) * 4, OP = up(O, 4) * 4;

// Read N numbers from shared memory, V at once.
template <int N, int V> DEVICE void take(float (&to)[up(N, V) * V], const float* s) {
#pragma unroll
  for (int i = 0; i < up(N, V); i++) {
    if (V == 4) { float4 v = ((const float4*)s)[i]; to[V * i] = v.x; to[V * i + V / 4] = v.y; to[V * i + V / 2] = v.z; to[V * i + V - 1] = v.w; }
    else if (V == 2) { float2 v = ((const float2*)s)[i]; to[V * i] = v.x; to[V * i + V - 1] = v.y; }
    else to[i] = s[i];
  }
}

// Add to the gradient of a filter that of a window with its maximum at `place`, found by halves so
// that it is a constant; the window begins in column `col` of v. `scatter` is the same for the images.
template <int LOW, int HIGH, int TALL, int LONG> DEVICE void gather(float (&acc)[T], const float (&v)[TALL][LONG], const int col, float g, int place) {
  constexpr int MIDDLE = (LOW + HIGH) / 2;
  if constexpr (HIGH - LOW == 1) {
#pragma unroll
    for (int t = 0; t < T; t++) acc[t] += g * v[t / K + LOW / P][col + t % K + LOW % P];
  } else if (place < MIDDLE) gather<LOW, MIDDLE>(acc, v, col, g, place);
  else gather<MIDDLE, HIGH>(acc, v, col, g, place);
}
template <int LOW, int HIGH, int TALL, int LONG> DEVICE void scatter(float (&acc)[TALL][LONG], const float (&f)[T], const int row, const int col, float g, int place) {
  constexpr int MIDDLE = (LOW + HIGH) / 2;
  if constexpr (HIGH - LOW == 1) {
#pragma unroll
    for (int t = 0; t < T; t++) acc[row + LOW / P + t / K][col + LOW % P + t % K] += g * f[t];
  } else if (place < MIDDLE) scatter<LOW, MIDDLE>(acc, f, row, col, g, place);
  else scatter<MIDDLE, HIGH>(acc, f, row, col, g, place);
}

// Filters (O, CT) to (CT, OP), zeros in the padding, by tiles of 32 x 32.
KERNEL(256, 4) pack(const float* __restrict__ w, float* __restrict__ wb) {
  constexpr int DOWN = up(CT, 32), ALONG = up(OP, 32);
  SHARED;
  const int tid = threadIdx.x, tile = blockIdx.x % (DOWN * ALONG), lane = tid % 32;
  const size_t client = blockIdx.x / (DOWN * ALONG);
  const int i0 = tile % DOWN * 32, o0 = tile / DOWN * 32;
  for (int r = tid / 32; r < 32; r += 8)
    sm[r * 33 + lane] = o0 + r < O && i0 + lane < CT ? w[(client * O + o0 + r) * CT + i0 + lane] : 0.f;
  __syncthreads();
  for (int r = tid / 32; r < 32; r += 8)
    if (i0 + r < CT && o0 + lane < OP) wb[(client * CT + i0 + r) * OP + o0 + lane] = sm[lane * 33 + r];
}

// The maximum of a window, its place in it, or DEAD behind the rectifier.
struct Maximum { float best; int place; };
DEVICE void larger(Maximum& m, float now, int place) {
  if (now > m.best || now != now) { m.best = now; m.place = place; }  // NaN wins, as in torch
}
DEVICE void finish(Maximum& m, float shift) {
  m.best += shift;
  if (RELU && m.best <= 0.f) { m.best = 0.f; m.place = DEAD; }
}

// From shared memory, ROWS rows of windows of OB filters of IM images, to runs of memory.
constexpr int RUN = WP % 4 == 0 ? 4 : 1;  // windows that move at once
ANYWHERE constexpr int apart(int windows) { return RUN == 4 ? windows + 4 : windows | 1; }
template <int THREADS, int IM, int OB, int ROWS, int STRIDE>
DEVICE void write(const float* values, const u8* places, float* out, u8* code, size_t at, int images, int ob, int row) {
  for (int i = threadIdx.x; i < IM * OB * ROWS * WP / RUN; i += THREADS) {
    const int px = i % (ROWS * WP / RUN) * RUN, part = i / (ROWS * WP / RUN), o = ob + part % OB, im = part / OB;
    if (o >= O || im >= images || px / WP + row >= HP) continue;
    const float* from = values + part * STRIDE + px;
    float* to = out + ((at + im) * O + o) * (HP * WP) + row * WP + px;
    if (RUN == 4) *(float4*)to = *(const float4*)from;
    else *to = *from;
  }
  if (code)
    for (int i = threadIdx.x; i < IM * OB * ROWS * CODES / 4; i += THREADS) {
      const int px = i % (ROWS * CODES / 4), part = i / (ROWS * CODES / 4), o = ob + part % OB, im = part / OB;
      if (o < O && im < images && px / (CODES / 4) + row < HP)
        ((unsigned*)code)[(((at + im) * O + o) * HP + row) * (CODES / 4) + px] = ((const unsigned*)places)[i];
    }
}

#ifdef F_TO
// A thread has F_RY x F_RX pixels of F_TO filters; a block F_BY rows of such patches, F_IM images and
// F_OB filters. Input channels come by F_CK through F_NST buffers.
constexpr int F_OG = F_OB / F_TO, F_GX = up(WP * P, F_RX), F_BANDS = up(up(HP * P, F_RY), F_BY), F_OBLK = up(OP, F_OB);
static_assert(F_OB % F_TO == 0 && C % F_CK == 0 && F_RX % P == 0 && F_RY % P == 0, "tiles of forward");
constexpr int F_WORK = F_OG * F_IM * F_BY * F_GX, F_THREADS = up(F_WORK, 32) * 32;
constexpr int F_BH = F_BY * F_RY + K - 1;
constexpr bool F_FLAT = PAD == 0 && W % 4 == 0 && F_GX * F_RX + K - 1 <= W && F_BANDS == 1 && F_BH <= H;
constexpr int F_PITCH = F_FLAT ? W : up(F_GX * F_RX + K - 1, 4) * 4, F_PLANE = F_BH * F_PITCH;
constexpr int F_FILTERS = F_CK * T * F_OB, F_STAGE = F_FILTERS + F_IM * F_CK * F_PLANE;
constexpr int F_ROWS = F_BY * F_RY / P, F_PX = F_ROWS * WP, F_STRIDE = apart(F_PX);
constexpr int F_SHARED = most(4 * F_NST * F_STAGE, F_IM * F_OB * (4 * F_STRIDE + F_ROWS * CODES));

DEVICE void stage_forward(float* d, const float* x, const float* w, int k, int band, int images, int filters) {
  const int tid = threadIdx.x;
  if (F_OB == OP)
    for (int i = tid; i < F_FILTERS / 4; i += F_THREADS) copy<16>(d + 4 * i, w + (size_t)k * F_FILTERS + 4 * i);
  else
    for (int i = tid; i < F_FILTERS / 4; i += F_THREADS) {
      const int o = i % (F_OB / 4) * 4, t = i / (F_OB / 4);
      const bool real = o < filters;
      copy<16>(d + 4 * i, real ? w + ((size_t)k * F_CK * T + t) * OP + o : w, real);
    }
  d += F_FILTERS;
  if (F_FLAT)
    for (int i = tid; i < F_IM * F_CK * F_PLANE / 4; i += F_THREADS) {
      const int at = i % (F_PLANE / 4), c = i / (F_PLANE / 4) % F_CK, img = i / (F_PLANE / 4 * F_CK);
      const bool real = img < images;
      copy<16>(d + 4 * i, real ? x + ((size_t)img * C + k * F_CK + c) * H * W + 4 * at : x, real);
    }
  else
    for (int i = tid; i < F_IM * F_CK * F_PLANE; i += F_THREADS) {
      const int col = i % F_PITCH - PAD, row = i / F_PITCH % F_BH + band * F_BY * F_RY - PAD, c = i / F_PLANE % F_CK, img = i / (F_PLANE * F_CK);
      const bool real = img < images && row >= 0 && row < H && col >= 0 && col < W;
      copy<4>(d + i, real ? x + (((size_t)img * C + k * F_CK + c) * H + row) * W + col : x, real);
    }
}

KERNEL(F_THREADS, F_MIN) forward(const float* __restrict__ x, const float* __restrict__ wb, const float* __restrict__ bias,
                               float* __restrict__ out, u8* __restrict__ code, int n) {
  SHARED;
  int b = blockIdx.x;
  const int ob = b % F_OBLK * F_OB; b /= F_OBLK;
  const int band = b % F_BANDS; b /= F_BANDS;
  const int groups = up(n, F_IM), first = b % groups * F_IM, images = n - first;
  const size_t client = b / groups, at = client * n + first;
  const int tid = threadIdx.x, mine = tid < F_WORK ? tid : 0;
  const int og = mine % F_OG, gx = mine / F_OG % F_GX, gy = mine / (F_OG * F_GX) % F_BY, img = mine / (F_OG * F_GX * F_BY);
  const float* xs = x + at * C * H * W;
  const float* ws = wb + client * CT * OP + ob;
  constexpr int CHUNKS = C / F_CK, V = F_PITCH % 4 == 0 && F_RX % 4 == 0 ? 4 : F_PITCH % 2 == 0 && F_RX % 2 == 0 ? 2 : 1;
  constexpr int LONG = up(F_RX + K - 1, V) * V, VO = F_TO % 4 == 0 ? 4 : F_TO % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int k = 0; k < F_NST - 1; k++) {
    if (k < CHUNKS) stage_forward(sm + k * F_STAGE, xs, ws, k, band, images, OP - ob);
    commit();
  }
  float acc[F_RY][F_RX][F_TO] = {};
  int slot = 0;
#pragma unroll 1
  for (int k = 0; k < CHUNKS; k++) {
    if (F_NST == 1) { stage_forward(sm, xs, ws, k, band, images, OP - ob); commit(); }
    arrived<(F_NST > 1 ? F_NST - 2 : 0)>();
    __syncthreads();
    if (F_NST > 1) {
      if (k + F_NST - 1 < CHUNKS) stage_forward(sm + (slot == 0 ? F_NST - 1 : slot - 1) * F_STAGE, xs, ws, k + F_NST - 1, band, images, OP - ob);
      commit();
    }
    const float* d = sm + slot * F_STAGE;
    slot = slot == F_NST - 1 ? 0 : slot + 1;
#pragma unroll 1
    for (int c = 0; c < F_CK; c++) {
      const float* wd = d + c * T * F_OB + og * F_TO;
      const float* in = d + F_FILTERS + (img * F_CK + c) * F_PLANE + gy * F_RY * F_PITCH + gx * F_RX;
      float v[F_RY + K - 1][LONG];
#pragma unroll
      for (int r = 0; r < F_RY - 1; r++) take<F_RX + K - 1, V>(v[r], in + r * F_PITCH);
#pragma unroll
      for (int kh = 0; kh < K; kh++) {
        take<F_RX + K - 1, V>(v[kh + F_RY - 1], in + (kh + F_RY - 1) * F_PITCH);
        float w[K][F_TO];
#pragma unroll
        for (int kw = 0; kw < K; kw++) take<F_TO, VO>(w[kw], wd + (kh * K + kw) * F_OB);
#pragma unroll
        for (int kw = 0; kw < K; kw++)
#pragma unroll
          for (int ry = 0; ry < F_RY; ry++)
#pragma unroll
            for (int rx = 0; rx < F_RX; rx++)
#pragma unroll
              for (int o = 0; o < F_TO; o++) acc[ry][rx][o] += v[kh + ry][rx + kw] * w[kw][o];
      }
    }
    if (F_NST == 1) __syncthreads();
  }
  arrived<0>();
  __syncthreads();
  // Maxima, through shared memory to runs of memory.
  float* values = sm;
  u8* places = (u8*)(sm + F_IM * F_OB * F_STRIDE);
  if (CODES > WP)
    for (int i = tid; i < F_IM * F_OB * F_ROWS * CODES; i += F_THREADS) if (i % CODES >= WP) places[i] = DEAD;
  if (tid < F_WORK) {
#pragma unroll
    for (int o = 0; o < F_TO; o++) {
      const int filter = ob + og * F_TO + o;
      const float shift = bias && filter < O ? bias[client * O + filter] : 0.f;
#pragma unroll
      for (int wy = 0; wy < F_RY / P; wy++)
#pragma unroll
        for (int wx = 0; wx < F_RX / P; wx++) {
          Maximum m = {acc[wy * P][wx * P][o], 0};
#pragma unroll
          for (int q = 1; q < P * P; q++) larger(m, acc[wy * P + q / P][wx * P + q % P][o], q);
          finish(m, shift);
          const int col = gx * (F_RX / P) + wx, row = gy * (F_RY / P) + wy, part = img * F_OB + og * F_TO + o;
          if (col < WP) {
            values[part * F_STRIDE + row * WP + col] = m.best;
            places[(part * F_ROWS + row) * CODES + col] = m.place;
          }
        }
    }
  }
  __syncthreads();
  write<F_THREADS, F_IM, F_OB, F_ROWS, F_STRIDE>(values, places, out, code, at, images, ob, band * F_ROWS);
}
FACTS facts_forward[] = {F_THREADS, F_SHARED, F_BANDS * F_OBLK, F_IM};
#endif

#ifdef M_NT
// The same with factors rounded to TF32, for C a multiple of M_CK. A warp has M_WINDOWS windows of one
// image by 8 M_NT filters: rows g and g + 8 of tile m are pixels 2 m and 2 m + 1 of window g.
constexpr int M_TILES = P == 1 ? 2 : P * P / 2, M_WINDOWS = P == 1 ? 32 : 8, M_PER = up(HP * WP, M_WINDOWS), M_OB = 8 * M_NT;
constexpr int M_THREADS = 32 * M_IM * M_PER, M_OBLK = up(OP, M_OB), M_WIDE = W + 2 * PAD, M_HIGH = H + 2 * PAD;
constexpr int M_PLANE = (M_HIGH * M_WIDE + 22) / 32 * 32 + 9, M_LINE = M_OB + 8, M_STRIDE = apart(HP * WP);
constexpr int M_IMAGES = up(M_IM * M_CK * M_PLANE, 4) * 4, M_FILTERS = M_CK * M_LINE;
constexpr int M_SHARED = most(4 * (2 * M_IMAGES + 3 * M_FILTERS), M_IM * M_OB * (4 * M_STRIDE + HP * CODES));
static_assert(C % M_CK == 0 && M_CK % 8 == 0 && K > 1 && (P == 1 || P % 2 == 0), "tiles of forward_tf32");

DEVICE float rounded(float x) { return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u); }

KERNEL(M_THREADS, 1) forward_tf32(const float* __restrict__ x, const float* __restrict__ wb, const float* __restrict__ bias,
                                  float* __restrict__ out, u8* __restrict__ code, int n) {
  SHARED;
  int b = blockIdx.x;
  const int ob = b % M_OBLK * M_OB; b /= M_OBLK;
  const int groups = up(n, M_IM), first = b % groups * M_IM, images = n - first;
  const size_t client = b / groups, at = client * n + first;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4, img = warp / M_PER;
  float* ws = sm + 2 * M_IMAGES;
  auto stage_x = [&](int chunk) {
    for (int i = tid; i < M_IM * M_CK * M_HIGH * M_WIDE; i += M_THREADS) {
      const int col = i % M_WIDE - PAD, row = i / M_WIDE % M_HIGH - PAD, c = i / (M_WIDE * M_HIGH) % M_CK, im = i / (M_WIDE * M_HIGH * M_CK);
      const bool real = im < images && row >= 0 && row < H && col >= 0 && col < W;
      copy<4>(sm + (chunk & 1) * M_IMAGES + (im * M_CK + c) * M_PLANE + i % (M_WIDE * M_HIGH),
              real ? x + (((at + im) * C + chunk * M_CK + c) * H + row) * W + col : x, real);
    }
  };
  auto stage_w = [&](int step) {
    for (int i = tid; i < M_CK * M_OB / 4; i += M_THREADS) {
      const int c = i / (M_OB / 4), o = i % (M_OB / 4) * 4;
      const bool real = ob + o < OP;
      copy<16>(ws + step % 3 * M_FILTERS + c * M_LINE + o, real ? wb + ((client * C + step / T * M_CK + c) * T + step % T) * OP + ob + o : wb, real);
    }
  };
  constexpr int STEPS = C / M_CK * T;
  int from[M_TILES][2];
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int q = P == 1 ? 0 : 2 * m + half, window = warp % M_PER * M_WINDOWS + g + (P == 1 ? 16 * m + 8 * half : 0);
      const int real = window < HP * WP ? window : 0;
      from[m][half] = img * M_CK * M_PLANE + (real / WP * P + q / P) * M_WIDE + real % WP * P + q % P + t * M_PLANE;
    }
  float acc[M_TILES][M_NT][4] = {};
  stage_x(0); stage_w(0); commit();
  stage_w(1); commit();
#pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    arrived<1>();
    __syncthreads();
    if (step + 2 < STEPS) stage_w(step + 2);
    if (step % T == 0 && step / T + 1 < C / M_CK) stage_x(step / T + 1);
    commit();
    const float* xs = sm + (step / T & 1) * M_IMAGES + step % T / K * M_WIDE + step % T % K;
    const float* w = ws + step % 3 * M_FILTERS + t * M_LINE + g;
#pragma unroll
    for (int c = 0; c < M_CK; c += 8) {
      float a[M_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[m][i] = rounded(xs[from[m][i & 1] + (c + (i >> 1) * 4) * M_PLANE]);
#pragma unroll
      for (int nt = 0; nt < M_NT; nt++) {
        const float b0 = rounded(w[c * M_LINE + nt * 8]), b1 = rounded(w[(c + 4) * M_LINE + nt * 8]);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) multiply(acc[m][nt], a[m], b0, b1);
      }
    }
  }
  arrived<0>();
  __syncthreads();
  float* values = sm;
  u8* places = (u8*)(sm + M_IM * M_OB * M_STRIDE);
  if (CODES > WP)
    for (int i = tid; i < M_IM * M_OB * HP * CODES; i += M_THREADS) if (i % CODES >= WP) places[i] = DEAD;
#pragma unroll
  for (int nt = 0; nt < M_NT; nt++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int filter = nt * 8 + 2 * t + e;
      const float shift = bias && ob + filter < O ? bias[client * O + ob + filter] : 0.f;
#pragma unroll
      for (int i = 0; i < (P == 1 ? 4 : 1); i++) {
        const int window = warp % M_PER * M_WINDOWS + g + 8 * i, part = img * M_OB + filter;
        Maximum m = {acc[i / 2][nt][i % 2 * 2 + e], 0};
#pragma unroll
        for (int q = 1; q < P * P; q++) larger(m, acc[q / 2][nt][q % 2 * 2 + e], q);
        finish(m, shift);
        if (window < HP * WP) {
          values[part * M_STRIDE + window] = m.best;
          places[(part * HP + window / WP) * CODES + window % WP] = m.place;
        }
      }
    }
  __syncthreads();
  write<M_THREADS, M_IM, M_OB, HP, M_STRIDE>(values, places, out, code, at, images, ob, 0);
}
FACTS facts_forward_tf32[] = {M_THREADS, M_SHARED, M_OBLK, M_IM};
#endif

// Channels from c0 on, at most 32.
DEVICE int lanes(int c0) { return C % 32 == 0 ? 32 : C < 32 ? C : C - c0 < 32 ? C - c0 : 32; }

#ifdef D_FW
// Gradient of the filters, many channels: lanes are channels, a warp has D_FW filters, a block
// D_NW * D_FW of them. D_BR rows of windows of an image at a time; a row in parts of D_CW windows.
constexpr int D_DB = D_FW * D_NW, D_THREADS = 32 * D_NW, D_OBLK = up(O, D_DB), D_CG = up(C, 32), D_BANDS = up(HP, D_BR);
constexpr int D_WIDE = up(WP, D_CW) * D_CW, D_NPX = D_BR * D_WIDE, D_BH = D_BR * P + K - 1;
constexpr bool D_FLAT = PAD == 0 && W % 2 == 0 && D_BANDS == 1 && D_BH <= H && D_WIDE * P + K - 1 <= W && P % 2 == 0 && K % 2 == 1;
constexpr int D_PITCH = D_FLAT ? W : up(D_WIDE * P + K - 1, 2) * 2;
constexpr int D_V = P % 2 == 0 && K % 2 == 1 ? 2 : 1;
constexpr int D_STRIDE = D_V == 2 ? (D_BH * D_PITCH + 1) / 4 * 4 + 2 : D_BH * D_PITCH | 1;  // no bank twice
constexpr int D_GS = D_DB + 4, D_HALF = up(32 * D_STRIDE + D_NPX * D_GS + (P > 1 ? up(D_NPX * D_DB, 4) : 0), 4) * 4;
constexpr int D_SHARED = 4 * most(2 * D_HALF, D_NW * 32 * T + D_THREADS);

DEVICE void stage_filters(float* d, const float* x, const float* g, const u8* code, size_t image, int band, int c0, int ob) {
  const int tid = threadIdx.x;
  const float* xs = x + (image * C + c0) * H * W;
  if (D_FLAT)
    for (int i = tid; i < 32 * (D_BH * W / 2); i += D_THREADS) {
      const int c = i / (D_BH * W / 2), at = i % (D_BH * W / 2) * 2;
      const bool real = C % 32 == 0 || c0 + c < C;
      copy<8>(d + c * D_STRIDE + at, real ? xs + c * H * W + at : xs, real);
    }
  else
    for (int i = tid; i < 32 * D_BH * D_PITCH; i += D_THREADS) {
      const int col = i % D_PITCH - PAD, row = i / D_PITCH % D_BH + band * D_BR * P - PAD, c = i / (D_BH * D_PITCH);
      const bool real = c0 + c < C && row >= 0 && row < H && col >= 0 && col < W;
      copy<4>(d + c * D_STRIDE + i % (D_BH * D_PITCH), real ? xs + (c * H + row) * W + col : xs, real);
    }
  float* gs = d + 32 * D_STRIDE;
  u8* cs = (u8*)(gs + D_NPX * D_GS);
#pragma unroll 4
  for (int i = tid; i < D_NPX * D_DB; i += D_THREADS) {
    const int px = i % D_NPX, o = i / D_NPX, row = px / D_WIDE + band * D_BR, col = px % D_WIDE;
    const bool real = col < WP && row < HP && ob + o < O;
    const size_t line = (image * O + ob + o) * HP + row;
    float value = real ? g[line * WP + col] : 0.f;
    if (P > 1) {
      const int place = real ? code[line * CODES + col] : DEAD;
      if (place == DEAD) value = 0.f;
      cs[px * D_DB + o] = place;
    }
    gs[px * D_GS + o] = value;
  }
}

KERNEL(D_THREADS, D_MIN) filters(const float* __restrict__ x, const float* __restrict__ g, const u8* __restrict__ code,
                               float* __restrict__ dw, float* __restrict__ db, int n, int splits) {
  SHARED;
  int b = blockIdx.x;
  const int ob = b % D_OBLK * D_DB; b /= D_OBLK;
  const int c0 = b % D_CG * 32; b /= D_CG;
  const int split = b % splits;
  const size_t client = b / splits;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int units = n * D_BANDS, per = up(units, splits), begin = split * per, end = begin + per < units ? begin + per : units;
  auto stage = [&](int u) { stage_filters(sm + (u & 1) * D_HALF, x, g, code, client * n + u / D_BANDS, u % D_BANDS, c0, ob); };
  if (begin < end) stage(begin);
  commit();
  float acc[D_FW][T] = {}, shift = 0.f;
  constexpr int TALL = K - 1 + P, LONG = P * D_CW + K - 1;
#pragma unroll 1
  for (int u = begin; u < end; u++) {
    arrived<0>();
    __syncthreads();
    if (u + 1 < end) stage(u + 1);
    commit();
    const float* hs = sm + (u & 1) * D_HALF + lane * D_STRIDE;
    const float* gs = sm + (u & 1) * D_HALF + 32 * D_STRIDE;
    const u8* cs = (const u8*)(gs + D_NPX * D_GS) + warp * D_FW;
    for (int q = tid / D_DB; q < D_NPX; q += D_THREADS / D_DB) shift += gs[q * D_GS + tid % D_DB];
    gs += warp * D_FW;
#pragma unroll 1
    for (int part = 0; part < D_NPX / D_CW; part++) {
      const float* hp = hs + part * D_CW / D_WIDE * P * D_PITCH + part * D_CW % D_WIDE * P;
      float v[TALL][LONG + (LONG & 1)];
#pragma unroll
      for (int i = 0; i < D_CW; i++) {
#pragma unroll
        for (int r = 0; r < TALL; r++)
#pragma unroll
          for (int col = i ? i * P + K - 1 : 0; col < i * P + P + K - 1; col += D_V) {
            if (D_V == 2) { float2 two = *(const float2*)(hp + r * D_PITCH + col); v[r][col] = two.x; v[r][col + D_V - 1] = two.y; }
            else v[r][col] = hp[r * D_PITCH + col];
          }
        const int q = part * D_CW + i;
        const unsigned places = P == 1 ? 0 : D_FW == 4 ? uniform(*(const unsigned*)(cs + q * D_DB)) : D_FW == 2 ? uniform(*(const unsigned short*)(cs + q * D_DB)) : uniform(cs[q * D_DB]);
        float now[D_FW];
        take<D_FW, (D_FW % 4 == 0 ? 4 : D_FW % 2 == 0 ? 2 : 1)>(now, gs + q * D_GS);
#pragma unroll
        for (int f = 0; f < D_FW; f++) {
          if (P == 1) {
#pragma unroll
            for (int t = 0; t < T; t++) acc[f][t] += now[f] * v[t / K][i + t % K];
          } else {
            const int place = places >> (8 * f) & 255;
            if (place != DEAD) gather<0, P * P>(acc[f], v, i * P, now[f], place);
          }
        }
      }
    }
  }
  arrived<0>();
  __syncthreads();
  float* own = sm + warp * 32 * T;
  const int channels = lanes(c0);
  const size_t to = client * splits + split;
#pragma unroll
  for (int f = 0; f < D_FW; f++) {
    const int o = ob + warp * D_FW + f;
#pragma unroll
    for (int t = 0; t < T; t++) own[lane * T + t] = acc[f][t];
    __syncwarp();
    if (o < O)
      for (int i = lane; i < channels * T; i += 32) dw[((to * O + o) * C + c0) * T + i] = own[i];
    __syncwarp();
  }
  float* sums = sm + D_NW * 32 * T;
  sums[tid] = shift;
  __syncthreads();
  if (c0 == 0 && tid < D_DB && ob + tid < O) {
    float all = 0.f;
    for (int i = tid; i < D_THREADS; i += D_DB) all += sums[i];
    db[to * O + ob + tid] = all;
  }
}

FACTS facts_filters[] = {D_THREADS, D_SHARED, D_OBLK * D_CG, D_BANDS};
#endif

#ifdef E_NW
// Gradient of the filters, few channels: lanes are filters, E_NW warps share E_BR rows of windows of
// E_IM images. One part of the sum a block, for `total`.
constexpr int E_THREADS = 32 * E_NW, E_OBLK = up(O, 32), E_BANDS = up(HP, E_BR), E_RUN = P == 1 ? 4 : 1;
constexpr int E_WIDE = up(WP, E_RUN) * E_RUN, E_NPX = E_BR * E_WIDE, E_BH = E_BR * P + K - 1, E_PITCH = E_WIDE * P + K - 1 | 1;
constexpr bool E_FLAT = WP % 4 == 0 && P > 1;  // copies of four windows
constexpr int E_GS = E_FLAT ? E_NPX + 4 : E_NPX | 1, E_CS = up(E_NPX, 4) * 4 | 4, E_IMAGE = up(C * E_BH * E_PITCH, 4) * 4;
constexpr int E_SHARED = most(4 * E_IM * (E_IMAGE + 32 * E_GS) + (P > 1 ? E_IM * 32 * E_CS : 0), 4 * E_NW * 32 * (CT + 1));

KERNEL(E_THREADS, E_MIN) few(const float* __restrict__ x, const float* __restrict__ g, const u8* __restrict__ code,
                           float* __restrict__ dw, float* __restrict__ db, int n) {
  SHARED;
  int b = blockIdx.x;
  const int o0 = b % E_OBLK * 32; b /= E_OBLK;
  const int units = up(n, E_IM) * E_BANDS, unit = b % units, band = unit % E_BANDS, first = unit / E_BANDS * E_IM, images = n - first;
  const size_t client = b / units, at = client * n + first;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  float* gs = sm + E_IM * E_IMAGE;
  u8* cs = (u8*)(gs + E_IM * 32 * E_GS);
  for (int i = tid; i < E_IM * C * E_BH * E_PITCH; i += E_THREADS) {
    const int col = i % E_PITCH - PAD, row = i / E_PITCH % E_BH + band * E_BR * P - PAD, c = i / (E_BH * E_PITCH) % C, im = i / (C * E_BH * E_PITCH);
    const bool real = im < images && row >= 0 && row < H && col >= 0 && col < W;
    copy<4>(sm + im * E_IMAGE + i % (C * E_BH * E_PITCH), real ? x + (((at + im) * C + c) * H + row) * W + col : x, real);
  }
  if (E_FLAT)
    for (int i = tid; i < E_IM * 32 * E_NPX / 4; i += E_THREADS) {
      const int px = i % (E_NPX / 4) * 4, part = i / (E_NPX / 4), o = o0 + part % 32, im = part / 32, row = px / WP + band * E_BR;
      const bool real = im < images && o < O && row < HP;
      const size_t line = ((at + im) * O + o) * HP + row;
      copy<16>(gs + part * E_GS + px, real ? g + line * WP + px % WP : g, real);
      copy<4>(cs + part * E_CS + px, real ? code + line * CODES + px % WP : code, real);
    }
  else
  for (int i = tid; i < E_IM * 32 * E_NPX; i += E_THREADS) {
    const int px = i % E_NPX, part = i / E_NPX, o = o0 + part % 32, im = part / 32, row = px / E_WIDE + band * E_BR, col = px % E_WIDE;
    const bool real = im < images && o < O && row < HP && col < WP;
    const size_t line = ((at + im) * O + o) * HP + row;
    copy<4>(gs + part * E_GS + px, real ? g + line * WP + col : g, real);
    if (P > 1) cs[part * E_CS + px] = real ? code[line * CODES + col] : DEAD;
  }
  commit();
  arrived<0>();
  __syncthreads();
  float acc[CT] = {}, shift = 0.f;
#pragma unroll 1
  for (int q = warp; q < E_IM * E_NPX / E_RUN; q += E_NW) {
    const int im = q / (E_NPX / E_RUN), px = q % (E_NPX / E_RUN) * E_RUN;
    const float* v = sm + im * E_IMAGE + px / E_WIDE * P * E_PITCH + px % E_WIDE * P;
    const float* gl = gs + (im * 32 + lane) * E_GS + px;
    float now[E_RUN];
#pragma unroll
    for (int i = 0; i < E_RUN; i++) now[i] = gl[i];
    if (P > 1) {
      const int place = cs[(im * 32 + lane) * E_CS + px];
      if (place == DEAD) now[0] = 0.f;
      else v += place / P * E_PITCH + place % P;
    }
#pragma unroll
    for (int i = 0; i < E_RUN; i++) shift += now[i];
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int kh = 0; kh < K; kh++) {
        float in[K + E_RUN - 1];
#pragma unroll
        for (int i = 0; i < K + E_RUN - 1; i++) in[i] = v[(c * E_BH + kh) * E_PITCH + i];
#pragma unroll
        for (int kw = 0; kw < K; kw++)
#pragma unroll
          for (int i = 0; i < E_RUN; i++) acc[c * T + kh * K + kw] += now[i] * in[kw + i];
      }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < CT; i++) sm[(warp * (CT + 1) + i) * 32 + lane] = acc[i];
  sm[(warp * (CT + 1) + CT) * 32 + lane] = shift;
  __syncthreads();
  const size_t to = client * units + unit;
  for (int i = tid; i < 32 * (CT + 1); i += E_THREADS) {
    const int o = i / (CT + 1), t = i % (CT + 1);
    float all = 0.f;
#pragma unroll
    for (int k = 0; k < E_NW; k++) all += sm[(k * (CT + 1) + t) * 32 + o];
    if (o0 + o < O) {
      if (t < CT) dw[(to * O + o0 + o) * CT + t] = all;
      else db[to * O + o0 + o] = all;
    }
  }
}

FACTS facts_few[] = {E_THREADS, E_SHARED, E_OBLK * E_BANDS, E_IM};
#endif

// Sum the parts of the gradients of filters and biases.
KERNEL(256, 4) total(const float* __restrict__ dw, const float* __restrict__ db, float* __restrict__ w, float* __restrict__ bias, int parts) {
  constexpr int ALL = O * CT + O, BLOCKS = up(ALL, 256);
  const size_t client = blockIdx.x / BLOCKS;
  const int i = blockIdx.x % BLOCKS * 256 + threadIdx.x, at = i < O * CT ? i : i - O * CT, size = i < O * CT ? O * CT : O;
  if (i >= ALL) return;
  const float* from = (i < O * CT ? dw : db) + client * parts * size + at;
  float all = 0.f;
  for (int k = 0; k < parts; k++) all += from[(size_t)k * size];
  (i < O * CT ? w : bias)[client * size + at] = all;
}

#ifdef X_NR
// Gradient of the images: lanes are channels, a warp spreads X_NR rows of X_TW windows of one image,
// for X_OC filters at a time; X_IM images a block.
constexpr int X_ROWS = up(HP, X_NR), X_COLS = up(WP, X_TW), X_PER = X_ROWS * X_COLS, X_THREADS = 32 * X_IM * X_PER, X_CG = up(C, 32);
static_assert(X_COLS == 1 || X_TW % 4 == 0, "tiles of images");
constexpr int X_PART = up(X_TW, 4) * 4, X_LINE = X_COLS * X_PART, X_G = X_IM * X_ROWS * X_NR * X_LINE;
constexpr int X_TS = T | 1, X_AH = X_ROWS * X_NR * P + K - 1, X_AW = X_COLS * X_TW * P + K - 1, X_PLANE = X_AH * X_AW | 1;
constexpr bool X_FLAT = T % 2 == 1 && CT % 4 == 0;
constexpr int X_FILTERS = up(X_OC * 32 * X_TS, 4) * 4, X_HALF = X_FILTERS + X_OC * X_G + X_OC * X_G / 4;
constexpr int X_SHARED = 4 * most(2 * X_HALF, X_IM * 32 * X_PLANE);

DEVICE void stage_images(float* d, const float* g, const u8* code, const float* w, size_t at, int images, int c0, int o0) {
  const int tid = threadIdx.x, channels = lanes(c0), count = O - o0 < X_OC ? O - o0 : X_OC;
  if (X_FLAT) {
    const int run = channels * T / 4;
    for (int i = tid; i < count * run; i += X_THREADS) copy<16>(d + i / run * 32 * T + i % run * 4, w + ((size_t)(o0 + i / run) * C + c0) * T + i % run * 4);
  } else {
    const int run = channels * T;
    for (int i = tid; i < count * run; i += X_THREADS)
      copy<4>(d + (i / run * 32 + i % run / T) * X_TS + i % T, w + ((size_t)(o0 + i / run) * C + c0) * T + i % run);
  }
  float* gs = d + X_FILTERS;
  unsigned* cs = (unsigned*)(gs + X_OC * X_G);
  for (int i = tid; i < count * X_G; i += X_THREADS) {
    const int part = i % X_LINE, col = part / X_PART * X_TW + part % X_PART, row = i / X_LINE % (X_ROWS * X_NR), im = i / (X_LINE * X_ROWS * X_NR) % X_IM, o = o0 + i / X_G;
    const bool real = im < images && row < HP && part % X_PART < X_TW && col < WP;
    const size_t line = ((at + im) * O + o) * HP + row;
    copy<4>(gs + i, real ? g + line * WP + col : g, real);
    if (i % 4 == 0) {
      const int word = part / X_PART * X_TW / 4 + part % X_PART / 4;
      if (im < images && row < HP && word < CODES / 4) copy<4>(cs + i / 4, (const unsigned*)code + line * (CODES / 4) + word);
      else cs[i / 4] = ~0u;
    }
  }
}

KERNEL(X_THREADS, X_MIN) images(const float* __restrict__ g, const u8* __restrict__ code, const float* __restrict__ w, float* __restrict__ dx, int n) {
  SHARED;
  int b = blockIdx.x;
  const int c0 = b % X_CG * 32; b /= X_CG;
  const int groups = up(n, X_IM), first = b % groups * X_IM, images = n - first;
  const size_t client = b / groups, at = client * n + first;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int im = warp / X_PER, row = warp % X_PER / X_COLS, col = warp % X_COLS;
  const float* wc = w + client * O * CT;
  stage_images(sm, g, code, wc, at, images, c0, 0);
  commit();
  constexpr int TALL = K - 1 + P * X_NR, LONG = K - 1 + P * X_TW;
  float acc[TALL][LONG] = {};
#pragma unroll 1
  for (int o0 = 0, k = 0; o0 < O; o0 += X_OC, k ^= 1) {
    arrived<0>();
    __syncthreads();
    if (o0 + X_OC < O) stage_images(sm + (k ^ 1) * X_HALF, g, code, wc, at, images, c0, o0 + X_OC);
    commit();
    const float* d = sm + k * X_HALF;
#pragma unroll 1
    for (int o = 0; o < (O - o0 < X_OC ? O - o0 : X_OC); o++) {
      float f[T];
#pragma unroll
      for (int t = 0; t < T; t++) f[t] = d[(o * 32 + lane) * X_TS + t];
#pragma unroll
      for (int r = 0; r < X_NR; r++) {
        const int line = o * X_G + (im * X_ROWS * X_NR + row * X_NR + r) * X_LINE + col * X_PART;
#pragma unroll
        for (int part = 0; part < X_PART; part += 4) {
          float now[4];
          take<4, 4>(now, d + X_FILTERS + line + part);
          const unsigned places = uniform(((const unsigned*)(d + X_FILTERS + X_OC * X_G))[(line + part) / 4]);
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (part + i < X_TW) {
              const int place = places >> (8 * i) & 255;
              if (place != DEAD) scatter<0, P * P>(acc, f, r * P, (part + i) * P, now[i], place);
            }
        }
      }
    }
  }
  arrived<0>();
  __syncthreads();
  for (int i = tid; i < X_IM * 32 * X_PLANE; i += X_THREADS) sm[i] = 0.f;
  __syncthreads();
  // Parts overlap by K - 1: warps take turns, so that no two add to a place at once.
  constexpr int DOWN = up(TALL, P * X_NR), ALONG = X_COLS > 1 ? up(LONG, P * X_TW) : 1;
#pragma unroll 1
  for (int turn = 0; turn < DOWN * ALONG; turn++) {
    if (row % DOWN == turn / ALONG && col % ALONG == turn % ALONG) {
      float* to = sm + (im * 32 + lane) * X_PLANE + row * X_NR * P * X_AW + col * X_TW * P;
#pragma unroll
      for (int r = 0; r < TALL; r++)
#pragma unroll
        for (int i = 0; i < LONG; i++) to[r * X_AW + i] += acc[r][i];
    }
    __syncthreads();
  }
  const int channels = lanes(c0);
  for (int i = tid; i < X_IM * channels * H * W; i += X_THREADS) {
    const int part = i / (channels * H * W), px = i % (channels * H * W), c = px / (H * W), y = px / W % H + PAD, z = px % W + PAD;
    if (part < images) dx[((at + part) * C + c0) * H * W + px] = y < X_AH && z < X_AW ? sm[(part * 32 + c) * X_PLANE + y * X_AW + z] : 0.f;
  }
}

FACTS facts_images[] = {X_THREADS, X_SHARED, X_CG, X_IM};
#endif

// Gradient of the convolution's output, with zeros, for images too large for `images`.
KERNEL(256, 4) spread(const float* __restrict__ g, const u8* __restrict__ code, float* __restrict__ to, long long count) {
  constexpr int HC = H + 2 * PAD - K + 1, WC = W + 2 * PAD - K + 1;
  const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  if (i >= count) return;
  const int x = i % WC, y = i / WC % HC;
  const long long plane = i / (WC * HC);
  float value = 0.f;
  if (x / P < WP && y / P < HP) {
    const long long line = plane * HP + y / P;
    if (code[line * CODES + x / P] == y % P * P + x % P) value = g[line * WP + x / P];
  }
  to[i] = value;
}
