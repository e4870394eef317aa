# What cloud-init writes and starts; secrets come from the parameter store at each boot.

locals {
  machine = "${path.module}/../../machine"

  boot_env = {
    for server in keys(local.servers) : server => templatefile("${path.module}/templates/boot.env.tftpl", {
      region           = var.region
      artifact_url     = var.artifact_url
      artifact_sha256  = var.artifact_sha256
      parameter_prefix = var.parameter_prefix
      account          = "sllm"
      mount            = "/var/lib/sllm"
      prefix           = "/opt/sllm"
      run              = "/run/sllm"
      server           = server
      cluster          = var.name
      routes           = join(" ", [for other in keys(local.servers) : "${other}.${var.domain}"])
      volume           = aws_ebs_volume.streams[server].id
      # Most of the volume; the rest is for what XFS itself needs.
      max_file_store = floor(var.volume_gb * 1073741824 * 0.9)
    })
  }

  cloud_config = {
    for server in keys(local.servers) : server => templatefile("${local.machine}/user_data.yaml.tftpl", {
      mask  = []
      units = ["sllm-boot.service", "sllm-nats.service"]
      files = {
        "/etc/sllm/boot.env"                                 = local.boot_env[server]
        "/usr/local/lib/sllm/boot.sh"                        = file("${local.machine}/boot.sh")
        "/usr/local/lib/sllm/cloud.sh"                       = file("${local.machine}/aws.sh")
        "/usr/local/lib/sllm/stages.sh"                      = file("${local.machine}/nats/stages.sh")
        "/etc/systemd/system/sllm-boot.service"              = file("${local.machine}/sllm-boot.service")
        "/etc/systemd/system/sllm-boot.service.d/again.conf" = file("${local.machine}/again.conf")
        "/etc/systemd/system/sllm-nats.service"              = file("${local.machine}/nats/sllm-nats.service")
      }
    })
  }

  user_data = { for server, text in local.cloud_config : server => base64gzip(text) }
}
